"""The thread that owns an engine. What it is to do comes through one queue, so that nothing needs a lock."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from serve.engine import Engine
from serve.outputs import RequestOutput
from serve.tickets import EngineError

LOG = logging.getLogger("serve")
Result = TypeVar("Result")


class EngineThread:
    """Turns an engine while there is something to do.

    Attributes:
      engine: the thread's own once it runs; others read plain numbers of it and no more.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_outputs: Callable[[Sequence[RequestOutput]], None],
        on_failure: Callable[[], None],
        on_death: Callable[[], None],
    ):
        """A thread that does not run yet.

        Args:
          engine: without requests.
          on_outputs: called on the thread with what a step gave out.
          on_failure: called on the thread after a step failed and the engine dropped its requests.
          on_death: called on the thread as its last act where it ends by an error.
        """
        self.engine = engine
        self._on_outputs, self._on_failure, self._on_death = on_outputs, on_failure, on_death
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._is_frozen = self._is_stopping = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts it."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive() and not self._has_ended

    def do(self, work: Callable[[], Result]) -> Future[Result]:
        """What `work` returns or raises, on the thread between two steps, after all that was asked before.

        Once the thread has ended the future raises `EngineError`.
        """
        future: Future[Result] = Future()
        self._inbox.put((work, future))
        # After the put: either the thread's own last look at the queue finds it, or this one does.
        if self._has_ended:
            self._turn_away()
        return future

    def freeze(self, is_frozen: bool) -> None:
        """Takes no further steps, or goes on. To be called on the thread."""
        self._is_frozen = is_frozen

    def stop(self, timeout: float) -> None:
        """Ends the thread after what was asked before, and waits for it, but no more than `timeout` seconds.

        A step that does not end is left to itself: the thread does not keep the process.
        """
        self.do(self._end)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _end(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._do_what_was_asked()
                if not self._is_stopping:
                    self._step()
        except BaseException:
            LOG.exception("the engine's thread has died")
            self._on_death()
        finally:
            self._has_ended = True
            self._turn_away()

    def _do_what_was_asked(self) -> None:
        can_step = self.engine.has_unfinished_requests() and not self._is_frozen
        with contextlib.suppress(queue.Empty):
            _do(*self._inbox.get(block=not can_step))
            while not self._is_stopping:
                _do(*self._inbox.get_nowait())

    def _turn_away(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                _, future = self._inbox.get_nowait()
                # One that was cancelled meanwhile takes no result.
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineError("The engine does not run."))

    def _step(self) -> None:
        try:
            outputs = self.engine.take_outputs() if self._is_frozen else self.engine.step()
        except Exception:
            LOG.exception("a step failed; whoever waits for it is told so")
            self.engine.reset()
            self._on_failure()
            return
        if outputs:
            self._on_outputs(outputs)


def _do(work: Callable[[], Result], future: Future[Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        # Whoever waits is told even where the thread ends by it.
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        future.set_result(result)
