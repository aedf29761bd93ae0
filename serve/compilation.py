"""How long XLA compiled, and where compiled programs are kept for the next process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_COMPILED = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_retrieval_time_sec"
_OPTIONS = {
    "jax_compilation_cache_dir": None,
    # Every program counts: an engine has few, and one that compiles fast on this machine may not on the next.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Programs that this process compiled, in all threads.

    Attributes:
      num_programs: compiled or found in a persistent cache.
      num_found: those found there.
      seconds: that it took.
    """

    num_programs: int = 0
    num_found: int = 0
    seconds: float = 0.0

    def __sub__(self, before: Compiled) -> Compiled:
        """What came since."""
        return Compiled(
            self.num_programs - before.num_programs, self.num_found - before.num_found, self.seconds - before.seconds
        )


class _Clock:
    """Listens to JAX, which has no way to stop listening: one for the process."""

    def __init__(self) -> None:
        self.total, self._lock = Compiled(), threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event in (_COMPILED, _FOUND):
            with self._lock:
                is_found, before = event == _FOUND, self.total
                # The time of a search in the cache is part of the time to compile.
                self.total = Compiled(
                    before.num_programs + (not is_found),
                    before.num_found + is_found,
                    before.seconds + (0.0 if is_found else duration_secs),
                )


@functools.cache
def _clock() -> _Clock:
    return _Clock()


def compiled_so_far() -> Compiled:
    """What was compiled since the first call of this function; the difference of two tells what came between them."""
    return _clock().total


@contextlib.contextmanager
def persistent_cache(folder: str | Path | None) -> Iterator[None]:
    """Keeps what is compiled inside in a folder, and looks there first; JAX's own settings are as before afterwards.

    Without a folder nothing changes.
    """
    if folder is None:
        yield
        return
    before = {name: getattr(jax.config, name) for name in _OPTIONS}
    keep_programs(folder)
    try:
        yield
    finally:
        _configure(before)


def keep_programs(folder: str | Path | None) -> None:
    """The same for the rest of the process."""
    if folder is not None:
        _configure(_OPTIONS | {"jax_compilation_cache_dir": str(folder)})


def _configure(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    # JAX looks at these settings once.
    compilation_cache.reset_cache()
