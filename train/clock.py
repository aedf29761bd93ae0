"""Where the seconds of an iteration go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Adds up seconds by what they were spent on: `with clock("rollout"): ...`.

    Attributes:
      seconds: by name.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts what happens within."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
