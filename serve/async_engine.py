"""An engine for an event loop: who may come in, and what came of whom.

All accounts are kept on the loop; the engine runs on a thread of its own (`engine_thread`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from serve.engine import Engine
from serve.engine_thread import EngineThread
from serve.outputs import RequestOutput
from serve.requests import Request
from serve.tickets import EngineError, OverloadedError, Ticket, UnavailableError

Gate = Literal["open", "keep", "closed", "draining"]
PauseMode = Literal["abort", "wait", "keep"]
_MAX_RETRY_AFTER = 60
_REASONS: dict[Gate, str] = {
    "closed": "The server is paused; it takes requests again after /resume.",
    "draining": "The server is shutting down.",
}
_BROKEN = "Internal server error"
Result = TypeVar("Result")


class AsyncEngine:
    """Takes requests for an engine. Everything is to be called on one event loop.

    Attributes:
      engine: its settings and limits may be read, all else through `call`.
      max_waiting: completions that may wait for a slot.
      gate: "open"; "keep": paused, new requests are taken and wait; "closed": paused, new ones are refused; "draining":
        refused for good.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024):
        """An engine that does not run yet; see `start`.

        Args:
          engine: without requests.
          max_waiting: completions that may wait for a slot, at least 0; further ones are refused.
        """
        self.engine, self.max_waiting = engine, max_waiting
        self.gate: Gate = "open"
        self._thread = EngineThread(
            engine,
            on_outputs=lambda outputs: self._post(self._deliver, outputs),
            on_failure=lambda: self._post(self._fail_all, EngineError(_BROKEN)),
            on_death=lambda: self._post(self._fail_all, EngineError(_BROKEN)),
        )
        self._tickets: dict[str, Ticket] = {}
        self._num_open = 0
        self._last_end, self._seconds_between = time.monotonic(), 1.0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Starts the engine's thread, for the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered, now or after a pause."""
        return self._thread.is_alive

    @property
    def num_open(self) -> int:
        """Completions that were taken and have not ended."""
        return self._num_open

    def submit(self, requests: Sequence[Request], *, deadline: float | None = None) -> list[Ticket]:
        """Takes requests, all or none; the tickets give what comes of them.

        Args:
          requests: checked by `Engine.check`.
          deadline: in `time.monotonic()`; what goes on then ends with what was read of it.

        Raises:
          UnavailableError: the server is paused, shuts down, or its engine has died.
          OverloadedError: too many wait already.
          ValueError: one of that name is being answered, or there are more completions than may ever wait.
        """
        if self.gate in _REASONS or not self.is_alive:
            raise self._unavailable()
        num_new = sum(request.params.n for request in requests)
        self._check_room(num_new)
        names = [request.request_id for request in requests]
        for index, name in enumerate(names):
            if name in self._tickets or name in names[:index]:
                raise ValueError(f"request_id must be new, got {name!r}, which is being answered.")
        self._num_open += num_new
        self._idle.clear()
        return [self._take(request, deadline) for request in requests]

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Ends requests, all of them for None; each is answered with what was read of it. Returns how many."""
        names = list(self._tickets) if request_ids is None else [name for name in request_ids if name in self._tickets]
        if names:
            self._thread.do(lambda: self.engine.abort_request(names))
        return len(names)

    async def call(self, work: Callable[[Engine], Result]) -> Result:
        """What `work` returns or raises, on the engine's thread between two steps; EngineError once that has ended."""
        return await asyncio.wrap_future(self._thread.do(lambda: work(self.engine)))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stops: after ending all requests, after answering them, or as they are. Nothing runs until `resume`.

        With "keep", new requests are taken and wait; else they are refused.
        """
        if self.gate == "draining":
            raise self._unavailable()
        self.gate = "keep" if mode == "keep" else "closed"
        if mode == "abort":
            self.abort()
        if mode != "keep":
            await self._idle.wait()
        await self.call(lambda _: self._thread.freeze(True))

    async def resume(self) -> None:
        """Goes on after `pause`."""
        if self.gate == "draining":
            raise self._unavailable()
        await self.call(lambda _: self._thread.freeze(False))
        self.gate = "open"

    async def drain(self, timeout: float) -> None:
        """Answers what was taken and nothing more; after `timeout` seconds, with what was read until then."""
        self.gate = "draining"
        self._thread.do(lambda: self._thread.freeze(False))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        self.abort()
        if self.is_alive:
            await self._idle.wait()

    async def stop(self) -> None:
        """Ends the thread; whoever still waits is told so."""
        self.gate = "draining"
        await asyncio.to_thread(self._thread.stop)
        self._fail_all(self._unavailable())

    def _take(self, request: Request, deadline: float | None) -> Ticket:
        ticket = Ticket(request, self._cancel)
        self._tickets[request.request_id] = ticket
        if deadline is not None:
            ticket.timer = self._loop.call_later(max(deadline - time.monotonic(), 0), self._expire, ticket)

        self._thread.do(lambda: self.engine.submit(request)).add_done_callback(
            lambda taken: self._post(self._fail, ticket, error) if (error := taken.exception()) else None
        )
        return ticket

    def _check_room(self, num_new: int) -> None:
        most = self.max_waiting + self.engine.config.max_num_seqs
        if num_new > most:
            raise ValueError(f"n must be at most {most} over all prompts together, got {num_new}.")
        if self._num_open + num_new > most:
            raise OverloadedError(
                f"{self._num_open} completions are running or waiting, of {most} at most; try again later.",
                self._retry_after(),
            )

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(_REASONS.get(self.gate, "The engine does not run."), self._retry_after())

    def _retry_after(self) -> int:
        """Seconds in which about half of what goes on will have ended."""
        return min(max(math.ceil(self._num_open * self._seconds_between / 2), 1), _MAX_RETRY_AFTER)

    def _cancel(self, ticket: Ticket) -> None:
        if self._tickets.get(ticket.request.request_id) is ticket:
            self.abort([ticket.request.request_id])

    def _expire(self, ticket: Ticket) -> None:
        ticket.is_late = True
        self._cancel(ticket)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is not None:
                if output.finished:
                    self._close(ticket)
                ticket.put(output)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        if self._tickets.get(ticket.request.request_id) is ticket:
            self._close(ticket)
            ticket.put(error)

    def _fail_all(self, error: Exception) -> None:
        for ticket in list(self._tickets.values()):
            self._fail(ticket, error)

    def _close(self, ticket: Ticket) -> None:
        num_ended, now = ticket.request.params.n, time.monotonic()
        del self._tickets[ticket.request.request_id]
        self._num_open -= num_ended
        # A moving average over some sixteen requests.
        self._seconds_between += ((now - self._last_end) / num_ended - self._seconds_between) / 16
        self._last_end = now
        if ticket.timer is not None:
            ticket.timer.cancel()
        if not self._tickets:
            self._idle.set()

    def _post(self, work: Callable[..., None], *arguments: Any) -> None:
        # A loop that has closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *arguments)
