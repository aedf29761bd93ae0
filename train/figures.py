"""Metrics of an iteration as short texts for people; whatever is missing is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, between the least and the greatest; a space where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, spread = min(finite), max(finite) - min(finite)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return BARS[int((value - low) / spread * (len(BARS) - 1) + 0.5)] if spread > 0 else BARS[0]

    return "".join(bar(value) for value in values)


def live_rows(
    row: Mapping[str, Any], evaluation: Mapping[str, Any], rewards: Sequence[float], worst_ratio: float, scored: str
) -> list[tuple[str, str]]:
    """Names and values of the live view.

    Args:
      row: metrics of the last iteration.
      evaluation: the last row of "eval/" metrics, with its "step"; may be empty.
      rewards: mean rewards of the last iterations, for the sparkline.
      worst_ratio: largest |ratio - 1| of the run.
      scored: what the policy is scored on.
    """
    spread = _of(row, "\u00b1 {:.3f} in a group", "rewards/std")
    reward = _join(_of(row, "{:.3f}", "rewards/mean"), spread, sep=" ")
    rows = [
        ("reward", f"{reward}  {sparkline(rewards)}" if len(rewards) > 1 else reward),
        ("exact answers", _of(row, "{:.1%}", "rewards/exact")),
        ("held out", _held_out(evaluation)),
        ("support size", _support(row)),
        ("scored", scored),
        ("max |ratio - 1|", _of({**row, "worst": worst_ratio}, "{:.1e} now, {:.1e} worst (first pass)",
                                "ratio/max_error", "worst")),
        ("ratio", _of(row, "mean {:.5f}, std {:.1e}", "ratio/mean", "ratio/std")),
        ("entropy", _of(row, "{:.3f} nats", "entropy")),
        ("KL from the start", _of(row, "{:.2e} nats", "kl")),
        ("clipped", _of(row, "{:.2%} of tokens", "clip_fraction")),
        ("completions", _join(_of(row, "{:.1f} tokens", "completions/mean_length"),
                              _of(row, "{:.0%} cut off", "completions/truncated_share"))),
        ("speed", _of(row, "{:,.0f} tokens/s", "tokens_per_second")),
        ("time", _times(row)),
        ("failed rewards", _failed(row)),
    ]  # fmt: skip
    return [(name, value) for name, value in rows if value]


def plain_line(row: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    """One line of metrics, for a log."""
    parts = (
        _of(row, "reward {:.3f}", "rewards/mean"),
        _of(row, "exact {:.3f}", "rewards/exact"),
        f"held out {held_out}" if (held_out := _held_out(evaluation)) else "",
        _of(row, "support {:.2f}", "support/size_mean"),
        _of(row, "one-id {:.2f}", "support/one_id_share"),
        _of(row, "max|ratio-1| {:.1e}", "ratio/max_error"),
        _of(row, "ratio {:.4f}\u00b1{:.4f}", "ratio/mean", "ratio/std"),
        _of(row, "entropy {:.3f}", "entropy"),
        _of(row, "KL {:.2e}", "kl"),
        f"failed rewards {failed}" if (failed := _failed(row)) else "",
        _of(row, "{:,.0f} tokens/s", "tokens_per_second"),
    )
    return _join(*parts, sep="  ")


def _of(row: Mapping[str, Any], text: str, *names: str) -> str:
    """The text with the metrics in its places, or nothing where one of them is missing."""
    values = [row.get(name) for name in names]
    return "" if None in values else text.format(*values)


def _join(*parts: str, sep: str = ", ") -> str:
    return sep.join(part for part in parts if part)


def _support(row: Mapping[str, Any]) -> str:
    sizes = _of(row, "median {:.0f}, 99th percentile {:.0f}", "support/size_median", "support/size_p99")
    mean, one_id = _of(row, "{:.2f} ids", "support/size_mean"), _of(row, "{:.0%} of one id", "support/one_id_share")
    return _join(mean, sizes, one_id, _of(row, "kept mass {:.3f}", "support/kept_mass"))


def _held_out(evaluation: Mapping[str, Any]) -> str:
    found = [f"{name[5:]} {value:.1%}" for name, value in evaluation.items() if name.startswith("eval/")]
    return f"{', '.join(found)} (after {evaluation['step'] + 1})" if found else ""


def _times(row: Mapping[str, Any]) -> str:
    parts = {name: row.get(f"time/{name}", 0.0) for name in ("rollout", "reward", "update")}
    whole = sum(parts.values())
    return _join(*(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items() if seconds)) if whole else ""


def _failed(row: Mapping[str, Any]) -> str:
    failed, late = row.get("rewards/num_failed", 0), row.get("rewards/num_timeouts", 0)
    return f"{failed:.0f} ({late:.0f} too slow)" if failed and late else f"{failed:.0f}" if failed else ""
