"""What a person sees while a run goes on: a live panel in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from train.figures import live_rows, plain_line

SECONDS_BETWEEN_LINES = 10.0
# As many as a sparkline has room for.
NUM_RECENT = 40


class Display:
    """Progress of one run.

    Use as a context manager and call `update` after each iteration.
    """

    def __init__(self, console: Console, title: str, *, num_iterations: int, sampling_mask: bool):
        """A run of `num_iterations`, scored on supports or, without the mask, on the whole vocabulary."""
        self._console, self._title = console, title
        self._num_iterations, self._sampling_mask = num_iterations, sampling_mask
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._last_line = -SECONDS_BETWEEN_LINES
        self._ends: deque[float] = deque(maxlen=50)
        self._rewards: deque[float] = deque(maxlen=NUM_RECENT)
        self._evaluation: dict[str, Any] = {}
        self._worst_ratio = 0.0

    def __enter__(self) -> Display:
        """Starts the live view, where there is one."""
        if self._live is not None:
            self._live.start()
            self._live.update(Panel("compiling the iteration\u2026", title=Text(self._title), title_align="left"))
        else:
            self._console.print(f"{self._title}: compiling the iteration", markup=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows iteration `step` (from 0) and those of its metrics that are there."""
        self._ends.append(time.monotonic())
        self._remember(step, metrics)
        if self._live is not None:
            self._live.update(self._panel(step + 1, metrics))
            return
        is_last = step + 1 == self._num_iterations
        if is_last or self._ends[-1] - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = self._ends[-1]
            line = plain_line(metrics, self._evaluation)
            done, left = f"{step + 1:>5}/{self._num_iterations}", _clock(self._seconds_left(step + 1))
            self._console.print(f"{done}  {line}  {left} left", soft_wrap=True, highlight=False, markup=False)

    def _remember(self, step: int, metrics: Mapping[str, Any]) -> None:
        """What outlives the iteration: rewards, the worst ratio, and the last evaluation, which few of them have."""
        self._rewards.append(metrics.get("rewards/mean", float("nan")))
        # NaN is worse than any number, and stays.
        self._worst_ratio = float(np.maximum(self._worst_ratio, metrics.get("ratio/max_error", 0.0)))
        found = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if found:
            self._evaluation = {**found, "step": step}

    def _seconds_left(self, done: int) -> float:
        if len(self._ends) < 2:
            return float("nan")
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace * (self._num_iterations - done)

    def _panel(self, done: int, metrics: Mapping[str, Any]) -> Panel:
        grid = Table.grid(padding=(0, 2))
        scored = "on the recorded supports" if self._sampling_mask else "full vocabulary (sampling mask off)"
        for name, value in live_rows(metrics, self._evaluation, list(self._rewards), self._worst_ratio, scored):
            grid.add_row(f"[bold]{name}", value)
        bar = ProgressBar(total=self._num_iterations, completed=done, width=40)
        status = Table.grid(padding=(0, 2))
        status.add_row(bar, f"{done}/{self._num_iterations}", f"{_clock(self._seconds_left(done))} left")
        return Panel(Group(status, grid), title=Text(self._title), title_align="left", expand=False)


def _clock(seconds: float) -> str:
    if seconds != seconds:
        return "?:??"
    hours, minutes, left = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
