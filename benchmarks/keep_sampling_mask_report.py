"""Tables and picture of the experiment in keep_sampling_mask.py, from the metrics of its runs alone."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.figure
import numpy as np

Run = Sequence[dict[str, float]]
Results = dict[tuple[str, float], list[Run]]

TOP_P = (0.8, 0.9)
TRUNCATED = ("supports", "full", "full-tis")
ARMS = (*TRUNCATED, "no-truncation", "supports-uneven")
TRAINING = ("reward", "exact", "ratio_mean", "ratio_std", "max_ratio_error", "entropy", "clip_fraction", "grad_norm")
LABELS = {
    "supports": "supports kept",
    "full": "full vocabulary",
    "full-tis": "full vocabulary, truncated importance sampling",
    "no-truncation": "no truncation",
}
COLOURS = {"supports": "#2563eb", "full": "#d97706", "full-tis": "#059669", "no-truncation": "#6b7280"}
# Two-sided 95 % points of Student's t with 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
# The last tenth of a run, for training metrics, and this many evaluations of held-out prompts.
LAST_EVALUATIONS = 4


def training(name: str, *, last: bool = True) -> Callable[[Run], float]:
    """The mean of a metric over the last tenth of a run, or over all of it."""
    return lambda run: float(np.mean([row[name] for row in run[-max(len(run) // 10, 1) if last else 0 :]]))


def held_out(name: str) -> Callable[[Run], float]:
    """The mean of a metric over the last evaluations."""
    return lambda run: float(np.mean([row[name] for row in run if name in row][-LAST_EVALUATIONS:]))


QUANTITIES: dict[str, tuple[Callable[[Run], float], int]] = {
    "reward, whole run": (training("reward", last=False), 3),
    "reward, last tenth": (training("reward"), 3),
    "held-out exact, sampled as in training": (held_out("exact/own"), 3),
    "held-out exact, sampled without truncation": (held_out("exact/whole"), 3),
    "held-out exact, greedy": (held_out("exact/greedy"), 3),
    "ratio on the first pass, mean": (training("ratio_mean", last=False), 4),
    "ratio on the first pass, spread": (training("ratio_std", last=False), 4),
    "clip fraction": (training("clip_fraction", last=False), 4),
    "gradient norm, whole run": (training("grad_norm", last=False), 2),
    "entropy over the vocabulary, nats": (held_out("vocabulary_entropy"), 3),
    "kept mass": (held_out("kept_mass"), 3),
    "one-id supports": (held_out("one_id_share"), 3),
}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t; infinite for one value."""
    num = len(values)
    if num < 2:
        return float(np.mean(values)), math.inf
    return float(np.mean(values)), STUDENT[num - 2] * float(np.std(values, ddof=1)) / math.sqrt(num)


def tables(found: Results) -> str:
    """Markdown: every quantity by arm, and the differences of arms, paired by seed."""
    parts = []
    for top_p in TOP_P:
        runs = {arm: found[arm, of] for arm in ARMS for of in (top_p, 1.0) if (arm, of) in found}
        parts += [f"### top-p {top_p}", "", _means(runs), "", _differences(runs), ""]
    return "\n".join(parts)


def _means(runs: dict[str, list[Run]]) -> str:
    lines = ["| | " + " | ".join(runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for name, (measure, digits) in QUANTITIES.items():
        cells = [f"{np.mean([measure(run) for run in of_arm]):.{digits}f}" for of_arm in runs.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _differences(runs: dict[str, list[Run]]) -> str:
    """Those whose interval leaves 0 out are bold."""
    pairs = [pair for pair in PAIRS if set(pair) <= runs.keys()]
    lines = ["| | " + " | ".join(" - ".join(pair) for pair in pairs) + " |", "|---" * (len(pairs) + 1) + "|"]
    for name, (measure, digits) in QUANTITIES.items():
        cells = []
        for one, other in pairs:
            values = [measure(a) - measure(b) for a, b in zip(runs[one], runs[other], strict=True)]
            mean, half = interval(values)
            mark = "**" if abs(mean) > half and round(mean, digits) else ""
            cells.append(f"{mark}{mean:+.{digits}f}{mark} ± {half:.{digits}f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PAIRS = (
    ("supports", "full"),
    ("supports", "full-tis"),
    ("full", "full-tis"),
    ("supports", "no-truncation"),
    ("supports-uneven", "supports"),
    ("supports-uneven", "full"),
)
PANELS = (
    ("reward", "mean reward"),
    ("exact/own", "held-out exact answers"),
    ("vocabulary_entropy", "entropy over the vocabulary, nats"),
    ("ratio_mean", "ratio on the first pass: mean"),
    ("ratio_std", "ratio on the first pass: spread"),
    ("grad_norm", "gradient norm, before clipping"),
)


def plot(found: Results, path: Path) -> None:
    """Writes a PNG: the panels for each top-p; mean over seeds, and a band of one standard deviation on both sides."""
    figure = matplotlib.figure.Figure(figsize=(12, 13.5), layout="constrained")
    halves = figure.subfigures(len(TOP_P), 1, hspace=0.04)
    handles = []
    for half, top_p in zip(halves, TOP_P, strict=True):
        half.suptitle(f"top-p {top_p}", fontsize=13, fontweight="bold", x=0.012, ha="left")
        for axes, (name, title) in zip(half.subplots(2, 3).flat, PANELS, strict=True):
            handles = [_curve(axes, arm, found[arm, top_p], name) for arm in TRUNCATED]
            handles.append(_curve(axes, "no-truncation", found["no-truncation", 1.0], name))
            axes.set_title(title, loc="left", fontsize=10.5)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            if name in ("reward", "exact/own"):
                axes.set_ylim(0, 1)
        for axes in half.axes[-3:]:
            axes.set_xlabel("iteration")
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _curve(axes, arm: str, runs: list[Run], name: str):
    steps = np.array([step for step, row in enumerate(runs[0], 1) if name in row])
    values = np.array([[row[name] for row in run if name in row] for run in runs])
    mean, spread = _smooth(values.mean(axis=0)), _smooth(values.std(axis=0))
    axes.fill_between(steps, mean - spread, mean + spread, color=COLOURS[arm], alpha=0.13, linewidth=0)
    # Two arms have a ratio of 1: both lines must be seen.
    style = "--" if arm == "no-truncation" else "-"
    return axes.plot(steps, mean, style, color=COLOURS[arm], linewidth=1.6, label=LABELS[arm])[0]


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running mean over a fiftieth of the points and those behind them."""
    window = max(1, len(values) // 50)
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
