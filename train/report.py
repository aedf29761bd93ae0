"""The picture of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

from train.report_series import column, smooth

BLUE, ORANGE, GREEN = "#2563eb", "#d97706", "#059669"
# A float32 ratio that is 1 to the last bit has no place on a logarithmic axis.
RATIO_FLOOR = 1e-8


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run, one entry a step; where a resumed run wrote a step again, the later line counts.

    A line that a killed run left unfinished is passed over: its step was written again, or is lost.
    """
    rows = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows[row["step"]] = row
    return [row for _, row in sorted(rows.items())]


def end_last_line(path: Path) -> None:
    """Ends a line that a killed run left unfinished, so that the next one does not stick to it."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def plot_curves(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Writes a PNG: reward, supports, ratio on the first pass, entropy and gradient norm over the iterations."""
    figure = matplotlib.figure.Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    reward, support, ratio, entropy = figure.subplots(2, 2).flat
    steps = np.array([row["step"] for row in rows])
    _lines(reward, steps, rows, {"rewards/mean": ("mean reward", BLUE), "rewards/exact": ("exact answers", GREEN)})
    rewards = column(rows, "rewards/mean")
    rewards = rewards[np.isfinite(rewards)]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    _finish(reward, "reward", ylim=(min(low, 0.0) - 0.02, max(high, 1.0) + 0.02))
    _lines(support, steps, rows, {"support/size_mean": ("mean ids per token", BLUE)})
    share = support.twinx()
    _lines(share, steps, rows, {"support/one_id_share": ("share of one-id supports (right axis)", ORANGE)})
    share.set(ylim=(-0.02, 1.02))
    share.grid(visible=False)
    sizes = column(rows, "support/size_mean")
    top = 1.05 * max(sizes[np.isfinite(sizes)], default=0.0)
    _finish(support, "support size", also=share.get_lines(), ylim=(0, max(top, 1)))
    _ratio(ratio, steps, rows)
    is_old = any(row.get("staleness/mean", 0) > 0 for row in rows)
    _finish(
        ratio, f"ratio on the first pass: {'an older policy drew' if is_old else 'same weights, so it should be 1'}"
    )
    _lines(entropy, steps, rows, {"entropy": ("entropy, nats", BLUE), "grad_norm": ("gradient norm", ORANGE)})
    _finish(entropy, "entropy on the scored ids, gradient norm", ylim=(0, None))
    for axes in (ratio, entropy):
        axes.set_xlabel("iteration")
    figure.savefig(path, dpi=120)


def _lines(axes: Any, steps: np.ndarray, rows: Sequence[dict[str, Any]], series: dict[str, tuple[str, str]]) -> None:
    for name, (label, colour) in series.items():
        values = column(rows, name)
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(values), color=colour, linewidth=1.8, label=label)
    axes.spines["top"].set_visible(False)


def _ratio(axes: Any, steps: np.ndarray, rows: Sequence[dict[str, Any]]) -> None:
    mean, spread, error = (column(rows, f"ratio/{name}") for name in ("mean", "std", "max_error"))
    series = (("largest |ratio - 1|", error, BLUE), ("|mean - 1|", np.abs(mean - 1), ORANGE), ("std", spread, GREEN))
    for label, values, colour in series:
        axes.semilogy(steps, np.maximum(values, RATIO_FLOOR), color=colour, linewidth=1.0, label=label)
    axes.set_ylim(RATIO_FLOOR, None)
    axes.spines["top"].set_visible(False)


def _finish(axes: Any, title: str, also: Sequence[Any] = (), **limits: Any) -> None:
    """Title, and the legend under it, outside of the axes, where no curve can run through it."""
    handles = [line for line in (*axes.get_lines(), *also) if not line.get_label().startswith("_")]
    axes.set_title(title, loc="left", pad=24)
    axes.legend(handles=handles, frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=3, fontsize=9)
    axes.grid(alpha=0.25)
    if limits:
        axes.set(**limits)
