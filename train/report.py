"""The picture of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#d97706", "#059669", "#94a3b8"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run, one entry a step; where a resumed run wrote a step again, the later line counts."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def plot_curves(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Writes a PNG: reward, supports, ratio on the first pass, entropy and gradient norm over the iterations."""
    figure = matplotlib.figure.Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    reward, support, ratio, entropy = figure.subplots(2, 2).flat
    steps = np.array([row["step"] for row in rows])
    _lines(reward, steps, rows, {"rewards/mean": ("mean reward", BLUE), "rewards/exact": ("exact answers", GREEN)})
    reward.set(title="reward", ylim=(-0.02, 1.02))
    _lines(support, steps, rows, {"support/size_mean": ("mean ids per token", BLUE)})
    support.set(title="support size", ylim=(0, None))
    share = support.twinx()
    _lines(share, steps, rows, {"support/one_id_share": ("one-id share (right)", ORANGE)})
    share.set(ylim=(-0.02, 1.02))
    share.spines["top"].set_visible(False)
    _ratio(ratio, steps, rows)
    _lines(entropy, steps, rows, {"entropy": ("entropy, nats", BLUE), "grad_norm": ("gradient norm", ORANGE)})
    entropy.set(title="entropy on the scored ids, gradient norm", ylim=(0, None))
    for axes in (reward, entropy):
        axes.legend(frameon=False)
    handles = [*support.get_lines()[1::2], *share.get_lines()[1::2]]
    support.legend(handles, [handle.get_label() for handle in handles], frameon=False, loc="center right")
    for axes in (ratio, entropy):
        axes.set_xlabel("iteration")
    figure.savefig(path, dpi=120)


def _lines(axes: Any, steps: np.ndarray, rows: Sequence[dict[str, Any]], series: dict[str, tuple[str, str]]) -> None:
    for name, (label, colour) in series.items():
        values = np.array([row[name] for row in rows], np.float64)
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(values), color=colour, linewidth=1.8, label=label)
    axes.spines["top"].set_visible(False)
    axes.grid(alpha=0.25)


def _ratio(axes: Any, steps: np.ndarray, rows: Sequence[dict[str, Any]]) -> None:
    mean = np.array([row["ratio/mean"] for row in rows])
    spread = np.array([row["ratio/std"] for row in rows])
    error = np.array([row["ratio/max_error"] for row in rows])
    # A float32 ratio that is 1 to the last bit has no place on a logarithmic axis.
    floor = 1e-8
    series = (("largest |ratio - 1|", error, BLUE), ("|mean - 1|", np.abs(mean - 1), ORANGE), ("std", spread, GREEN))
    for label, values, colour in series:
        axes.semilogy(steps, np.maximum(values, floor), color=colour, linewidth=1.0, label=label)
    axes.axhline(1e-5, color=GREY, linewidth=1, linestyle="--")
    axes.set(title="ratio on the first pass (same weights: it should be 1)", ylim=(floor, None))
    axes.spines["top"].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running mean over about a thirtieth of the run, of what lies behind each step."""
    window = max(1, len(values) // 30)
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
