"""From lines of metrics to the lines of charts: few enough points to draw, whatever is missing left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

MAX_POINTS = 300


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
      label: for the legend.
      x: iterations, ascending.
      y: values, smoothed where they are noisy; NaN where there is none that is finite.
      raw: the same not smoothed, to be drawn faintly; None where that is a band's matter, or `y` itself.
      low: lower edge of a band around the line; None for no band.
      high: upper edge.
      is_sparse: few points, to be marked each.
    """

    label: str
    x: Float[np.ndarray, " N"]
    y: Float[np.ndarray, " N"]
    raw: Float[np.ndarray, " N"] | None = None
    low: Float[np.ndarray, " N"] | None = None
    high: Float[np.ndarray, " N"] | None = None
    is_sparse: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over the iterations.

    Attributes:
      title: what is drawn, with its unit.
      lines: at least one.
      note: a sentence for who does not know the quantity.
      is_log: the values' axis is logarithmic.
      reference: a value to draw a thin line at.
      num_not_finite: values that are NaN or infinite.
    """

    title: str
    lines: tuple[Line, ...]
    note: str = ""
    is_log: bool = False
    reference: float | None = None
    num_not_finite: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A chart before its run.

    Attributes:
      section: it stands in.
      title: as in `Chart`; also `note`, `is_log` and `reference`.
      series: names of metrics by label.
      spread: the metric that says how far the band reaches above and below the line.
      hides_zero: not drawn where all is 0.
      is_noisy: drawn smoothed, over what it was.
    """

    section: str
    title: str
    series: Mapping[str, str]
    note: str = ""
    is_log: bool = False
    reference: float | None = None
    spread: str | None = None
    hides_zero: bool = False
    is_noisy: bool = True


PLANS = (
    Plan("Rewards", "Reward", {"mean": "rewards/mean", "exact answers": "rewards/exact"},
         "Mean over the completions of an iteration, and the share that is fully right."),
    Plan("Rewards", "Spread of rewards in a group", {"standard deviation": "rewards/std",
                                                     "groups of equal rewards": "rewards/zero_std_share"},
         "Groups whose rewards are all equal teach nothing."),
    Plan("Policy and behaviour", "Ratio, mean \u00b1 standard deviation", {"ratio": "ratio/mean"},
         "Policy over behaviour on the first pass, where both have the same weights: 1 where both are scored on the "
         "same ids.", reference=1.0, spread="ratio/std"),
    Plan("Policy and behaviour", "Largest |ratio \u2212 1|", {"first pass": "ratio/max_error"}, is_log=True),
    Plan("Policy and behaviour", "Mismatch KL, nats", {"behaviour from policy": "ratio/mismatch_kl"},
         "Mean of ratio \u2212 1 \u2212 log ratio on the first pass.", is_log=True),
    Plan("Policy and behaviour", "KL from the reference, nats", {"kl": "kl"}),
    Plan("Policy and behaviour", "Clip fraction", {"tokens without gradient": "clip_fraction"}),
    Plan("Policy and behaviour", "Staleness, iterations", {"mean": "staleness/mean"}, hides_zero=True),
    Plan("Supports", "Support size, ids", {"mean": "support/size_mean", "median": "support/size_median",
                                           "99th percentile": "support/size_p99"},
         "Ids that each token was drawn from.", is_log=True),
    Plan("Supports", "Shares of tokens", {"of one id": "support/one_id_share", "overflow": "support/overflow_rate"},
         "A support of one id is no choice: log-probability 0, no gradient."),
    Plan("Supports", "Kept mass", {"mean": "support/kept_mass"},
         "Probability that the full policy gives to the support."),
    Plan("Optimisation", "Entropy, nats", {"of the scored distribution": "entropy"}),
    Plan("Optimisation", "Gradient norm", {"before clipping": "grad_norm"}, is_log=True),
    Plan("Optimisation", "Loss", {"first pass": "loss"}),
    Plan("Optimisation", "Learning rate", {"learning rate": "learning_rate"}, is_noisy=False),
    Plan("Completions", "Length, tokens", {"mean": "completions/mean_length"}),
    Plan("Completions", "Cut off at the limit", {"share of completions": "completions/truncated_share"}),
    Plan("Completions", "Rewards that failed", {"failed": "rewards/num_failed", "too slow": "rewards/num_timeouts"},
         hides_zero=True),
    Plan("Speed", "Tokens per second", {"sampled and trained on": "tokens_per_second"}),
    Plan("Speed", "Seconds per iteration", {"rollout": "time/rollout", "reward": "time/reward",
                                            "update": "time/update"}),
)  # fmt: skip
_PLANNED = {name for plan in PLANS for name in plan.series.values()}


def charts(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Chart]]:
    """The charts of a run by section; those without a single value are left out.

    Args:
      rows: of metrics, by ascending "step".
    """
    names = dict.fromkeys(name for row in rows for name in row)
    found: dict[str, list[Chart]] = {}
    for plan in (PLANS[0], *_of_prefixes(names), *PLANS[1:]):
        chart = _chart(plan, rows)
        if chart is not None:
            found.setdefault(plan.section, []).append(chart)
    return found


def column(rows: Sequence[Mapping[str, Any]], name: str) -> Float[np.ndarray, " N"]:
    """The values of a metric; NaN where a row has none."""
    values = (row.get(name) for row in rows)
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], np.float64)


def bin_starts(num: int, most: int) -> np.ndarray:
    """Where each of at most `most` bins of consecutive points begins, of about equal size."""
    return np.unique(np.linspace(0, num, min(num, most), endpoint=False).astype(np.int64))


def _of_prefixes(names: Mapping[str, None]) -> list[Plan]:
    """Charts of metrics whose names a task or a user chose."""
    parts = {name[8:]: name for name in names if name.startswith("rewards/") and name not in _PLANNED}
    evaluation = {name[5:]: name for name in names if name.startswith("eval/")}
    plans = [Plan("Rewards", "Held-out evaluation", evaluation, "On the prompts of the evaluation.")]
    return [*plans, Plan("Rewards", "Rewards by function", parts)]


def _chart(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    lines, num_not_finite = [], 0
    for label, name in plan.series.items():
        found = [row for row in rows if row.get(name) is not None]
        if not found:
            continue
        values = column(found, name)
        num_not_finite += int((~np.isfinite(values)).sum())
        spread = None if plan.spread is None else column(found, plan.spread)
        lines.append(_line(label, column(found, "step"), values, spread, plan, len(rows)))
    if not lines or (plan.hides_zero and not any(line.y.any() for line in lines)):
        return None
    return Chart(plan.title, tuple(lines), plan.note, plan.is_log, plan.reference, num_not_finite)


def _line(
    label: str, steps: np.ndarray, values: np.ndarray, spread: np.ndarray | None, plan: Plan, num_rows: int
) -> Line:
    """At most MAX_POINTS points: means of bins, in a band of +- `spread`, or of the least and greatest of the bin."""
    values = np.where(np.isfinite(values), values, np.nan)
    starts = bin_starts(len(values), MAX_POINTS)
    x = np.add.reduceat(steps, starts) / np.diff(np.append(starts, len(values)))
    mean = _bin_means(values, starts)
    if spread is not None:
        half = _bin_means(np.where(np.isfinite(values), spread, np.nan), starts)
        return Line(label, x, mean, low=mean - half, high=mean + half)
    is_sparse = len(values) < 0.5 * num_rows or len(values) == 1
    is_smoothed = plan.is_noisy and not is_sparse
    y = smooth(mean) if is_smoothed else mean
    if len(starts) == len(values):
        return Line(label, x, y, raw=mean if is_smoothed else None, is_sparse=is_sparse)
    return Line(label, x, y, None, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts), is_sparse)


def _bin_means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of the values of each bin that are not NaN; NaN where all are."""
    num = np.add.reduceat(np.isfinite(values).astype(np.float64), starts)
    sums = np.add.reduceat(np.where(np.isfinite(values), values, 0.0), starts)
    return np.where(num > 0, sums / np.maximum(num, 1), np.nan)


def smooth(values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """A running mean over about a thirtieth of the run around each step, of finite values; NaN where none is."""
    reach = len(values) // 60
    is_finite = np.isfinite(values)
    place = np.arange(len(values))
    starts, ends = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(values))

    def sums(terms: np.ndarray) -> np.ndarray:
        running = np.cumsum(np.concatenate([np.zeros(1), terms]))
        return running[ends] - running[starts]

    num = sums(is_finite.astype(np.float64))
    return np.where(num > 0, sums(np.where(is_finite, values, 0.0)) / np.maximum(num, 1), np.nan)
