"""What a person sees while a run goes on: a live panel in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Progress of one run.

    Use as a context manager and call `update` after each iteration.
    """

    def __init__(self, console: Console, title: str, *, num_iterations: int, sampling_mask: bool):
        """A run of `num_iterations`, scored on supports or, without the mask, on the whole vocabulary."""
        self._console, self._title = console, title
        self._num_iterations, self._sampling_mask = num_iterations, sampling_mask
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._started = time.monotonic()
        self._last_line = -SECONDS_BETWEEN_LINES
        self._ends: deque[float] = deque(maxlen=50)
        self._worst_ratio = 0.0

    def __enter__(self) -> Display:
        """Starts the live view, where there is one."""
        if self._live is not None:
            self._live.start()
            self._live.update(Panel("compiling the iteration\u2026", title=self._title, title_align="left"))
        else:
            self._console.print(f"{self._title}: compiling the iteration")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows iteration `step` (from 0) and its metrics."""
        self._ends.append(time.monotonic())
        self._worst_ratio = max(self._worst_ratio, metrics["ratio/max_error"])
        if self._live is not None:
            self._live.update(self._panel(step + 1, metrics))
            return
        is_last = step + 1 == self._num_iterations
        if is_last or self._ends[-1] - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = self._ends[-1]
            self._console.print(self._line(step + 1, metrics), soft_wrap=True)

    def _seconds_left(self, done: int) -> float:
        if len(self._ends) < 2:
            return float("nan")
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace * (self._num_iterations - done)

    def _rows(self, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
        size, one_id = metrics["support/size_mean"], metrics["support/one_id_share"]
        mask = "on the recorded supports" if self._sampling_mask else "full vocabulary (sampling mask off)"
        rows = [
            ("reward", f"{metrics['rewards/mean']:.3f}"),
            ("exact answers", f"{metrics['rewards/exact']:.1%}"),
            (
                "support size",
                f"{size:.2f} ids, {one_id:.0%} of one id",
            ),
            ("scored", mask),
            ("max |ratio - 1|", f"{metrics['ratio/max_error']:.1e} now, {self._worst_ratio:.1e} worst (first pass)"),
            ("ratio", f"mean {metrics['ratio/mean']:.5f}, std {metrics['ratio/std']:.1e}"),
            ("speed", f"{metrics['tokens_per_second']:,.0f} tokens/s"),
        ]
        if "kl" in metrics:
            rows.insert(-1, ("KL from the start", f"{metrics['kl']:.2e} nats"))
        return rows

    def _panel(self, done: int, metrics: Mapping[str, Any]) -> Panel:
        grid = Table.grid(padding=(0, 2))
        for name, value in self._rows(metrics):
            grid.add_row(f"[bold]{name}", value)
        bar = ProgressBar(total=self._num_iterations, completed=done, width=40)
        status = Table.grid(padding=(0, 2))
        status.add_row(bar, f"{done}/{self._num_iterations}", f"{_clock(self._seconds_left(done))} left")
        return Panel(Group(status, grid), title=self._title, title_align="left", expand=False)

    def _line(self, done: int, metrics: Mapping[str, Any]) -> str:
        kl = f"KL {metrics['kl']:.2e}  " if "kl" in metrics else ""
        return (
            f"{done:>5}/{self._num_iterations}  reward {metrics['rewards/mean']:.3f}  "
            f"exact {metrics['rewards/exact']:.3f}  support {metrics['support/size_mean']:.2f}  "
            f"one-id {metrics['support/one_id_share']:.2f}  max|ratio-1| {metrics['ratio/max_error']:.1e}  "
            f"ratio {metrics['ratio/mean']:.4f}\u00b1{metrics['ratio/std']:.4f}  {kl}"
            f"{metrics['tokens_per_second']:,.0f} tokens/s  {_clock(self._seconds_left(done))} left"
        )


def _clock(seconds: float) -> str:
    return "?:??" if seconds != seconds else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
