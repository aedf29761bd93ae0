"""A polite end: SIGTERM lets the iteration finish, and the run saves and leaves."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stopping:
    """Whether somebody asked for the end; a context manager, within which SIGTERM asks for it.

    A second SIGTERM ends the process as it would have without it. Outside of the main thread, where Python allows no
    handlers, nobody can ask.
    """

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.is_requested = False
        self._before: Any = None

    def __enter__(self) -> Stopping:
        """Takes the signal."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the signal back."""
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
