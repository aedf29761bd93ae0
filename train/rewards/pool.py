"""Reward functions in worker processes, each call with a time-out; what hangs is killed, what dies is replaced."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pebble

from train.rewards import worker

# For starting Python, and importing what the functions import.
START_TIMEOUT = 120.0


@dataclasses.dataclass(frozen=True)
class Call:
    """One function on some completions.

    Attributes:
      name: of the function.
      rows: which completions.
      prompts: of the rows, as completions.
      columns: of the data, one value per row.
    """

    name: str
    rows: range
    prompts: list[str]
    completions: list[str]
    columns: Mapping[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A call without scores.

    Attributes:
      kind: "timed out", "died" or "failed".
      reason: in words.
    """

    kind: str
    reason: str


class FunctionPool:
    """Worker processes that have the functions loaded.

    They start from a clean process, never as a copy of this one, whose threads hold locks; and they end with it, also
    where it is killed.
    """

    def __init__(
        self,
        targets: Mapping[str, str | Callable[..., Any]],
        *,
        num_workers: int,
        timeout: float,
        imports: Sequence[str] = (),
    ):
        """A pool; its workers start with the first calls.

        Args:
          targets: functions by name, as `worker.start` takes them.
          num_workers: processes, at least 1.
          timeout: seconds of one call, > 0.
          imports: modules that workers should find imported; only the first pool of a process has a say.
        """
        self._targets, self._num_workers, self._timeout = dict(targets), num_workers, timeout
        self._context = _context(imports)
        self._lock = threading.Lock()
        self._pool: pebble.ProcessPool | None = None
        self._end: weakref.finalize | None = None
        self._is_closed = False

    def check(self, columns: Sequence[str]) -> None:
        """Makes sure that every function can be loaded, and called with these columns.

        Raises:
          ValueError: one cannot; the message names it.
        """
        # In a process that has loaded nothing: a file that ends its process while it is loaded would end every worker.
        pool = pebble.ProcessPool(1, initializer=worker.start, initargs=[{}], context=self._context)
        try:
            for name, target in self._targets.items():
                future = pool.schedule(worker.check, args=(target, list(columns)), timeout=START_TIMEOUT)
                reason = _reason(future)
                if reason is not None:
                    where = target if isinstance(target, str) else name
                    raise ValueError(f"rewards: {where!r} cannot be used: {reason}.")
        finally:
            _stop(pool)

    def run(self, calls: Sequence[Call]) -> list[list[float] | Failure]:
        """The scores of every call, or why there are none; in order, whatever the number of workers.

        Raises:
          RuntimeError: the pool was closed.
        """
        futures = [
            self._schedule(worker.call, (call.name, call.prompts, call.completions, dict(call.columns)), self._timeout)
            for call in calls
        ]
        return [_outcome(future, self._timeout) for future in futures]

    def close(self) -> None:
        """Ends the workers, whatever they do, and for good."""
        with self._lock:
            self._is_closed = True
            if self._end is not None:
                self._end()
            self._pool = None

    def _schedule(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        try:
            return self._active().schedule(function, args=arguments, timeout=timeout)
        except RuntimeError:  # the pool broke since it was looked at
            return self._active().schedule(function, args=arguments, timeout=timeout)

    def _active(self) -> pebble.ProcessPool:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the reward functions were ended.")
            if self._pool is None or not self._pool.active:
                if self._end is not None:
                    self._end()
                self._pool = pebble.ProcessPool(
                    self._num_workers, initializer=worker.start, initargs=[self._targets], context=self._context
                )
                self._end = weakref.finalize(self, _stop, self._pool)
            return self._pool


def _context(imports: Sequence[str]) -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__, *imports])
    return context


def _stop(pool: pebble.ProcessPool) -> None:
    pool.stop()
    pool.join()


def _reason(future: Any) -> str | None:
    try:
        reason: str | None = future.result()
    except concurrent.futures.TimeoutError:
        return f"it is not loaded after {START_TIMEOUT:.0f} s"
    except pebble.ProcessExpired as error:
        return f"its process ended with code {error.exitcode} while it was loaded"
    return reason


def _outcome(future: Any, timeout: float) -> list[float] | Failure:
    try:
        scores = future.result()
    except concurrent.futures.TimeoutError:
        return Failure("timed out", f"no scores after {timeout:g} s")
    except pebble.ProcessExpired as error:
        return Failure("died", f"its process ended with code {error.exitcode}")
    except Exception as error:  # columns that cannot be sent, a pool that broke
        return Failure("failed", f"{type(error).__name__}: {error}")
    return Failure("failed", scores) if isinstance(scores, str) else scores
