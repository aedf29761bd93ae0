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
from serve.gate import Gate, State
from serve.outputs import RequestOutput
from serve.requests import Request
from serve.tickets import EngineError, Observer, OverloadedError, Ticket, UnavailableError

PauseMode = Literal["abort", "wait", "keep"]
_MAX_RETRY_AFTER = 60
# Seconds for a step to end in, once nobody waits for it any longer.
_GRACE = 10.0
_BROKEN = "Internal server error"
Result = TypeVar("Result")


class AsyncEngine:
    """Takes requests for an engine. Everything is to be called on one event loop.

    Attributes:
      engine: its settings and limits may be read, all else through `call`.
      max_waiting: completions that may wait for a slot.
      gate: whether requests may come in.
      observer: is told what came of requests; None: nobody.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024, observer: Observer | None = None):
        """An engine that does not run yet; see `start`.

        Args:
          engine: without requests.
          max_waiting: completions that may wait for a slot, at least 0; further ones are refused.
          observer: see the attribute.
        """
        self.engine, self.max_waiting, self.observer = engine, max_waiting, observer
        self.gate = Gate()
        self._thread = EngineThread(
            engine,
            on_outputs=lambda outputs: self._post(self._deliver, outputs),
            # What was submitted after the step that failed goes on.
            on_failure=lambda: self._post(self._fail_all, EngineError(_BROKEN), self._num_begun),
            on_death=lambda: self._post(self._fail_all, EngineError(_BROKEN)),
        )
        self._tickets: dict[str, Ticket] = {}
        self._num_taken = self._num_begun = 0
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

    @property
    def request_ids(self) -> list[str]:
        """Names of the requests that were taken and have not ended."""
        return list(self._tickets)

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
        if self.gate.refusal or not self.is_alive:
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
        names = [name for name in self._tickets if request_ids is None or name in request_ids]
        if names:
            self._thread.do(lambda: self.engine.abort_request(names))
        return len(names)

    async def call(self, work: Callable[[Engine], Result]) -> Result:
        """What `work` returns or raises, on the engine's thread between two steps; EngineError once that has ended."""
        return await asyncio.wrap_future(self._thread.do(lambda: work(self.engine)))

    async def pause(self, mode: PauseMode = "abort", gate: Literal["closed", "updating", "asleep"] = "closed") -> None:
        """Stops: after ending all requests, after answering them, or as they are. Nothing runs until `resume`.

        With "keep", new requests are taken and wait; else they are refused, for the reason that `gate` gives.

        Raises:
          ConflictError: another call changed the gate before all requests had ended.
          UnavailableError: the server shuts down, or its engine has died.
        """
        self._turn("keep" if mode == "keep" else gate)
        if mode == "abort":
            self.abort()
        if mode != "keep":
            # Requests that an earlier pause kept end as well.
            self._thread.do(lambda: self._thread.freeze(False))
            await self.gate.wait_for(self._idle)
        await self.call(lambda _: self._thread.freeze(True))

    async def resume(self, gate: Literal["open", "keep", "closed"] = "open") -> None:
        """Goes on after `pause`, or back to another kind of pause.

        Raises:
          UnavailableError: the server shuts down, or its engine has died.
        """
        self._turn(gate)
        # Asked for at once: the thread hears of changes in the order of the gate's.
        await self.call(lambda _: self._thread.freeze(gate != "open"))

    async def drain(self, timeout: float) -> None:
        """Answers what was taken and nothing more; after `timeout` seconds, with what was read until then."""
        self.gate.turn("draining")
        self._thread.do(lambda: self._thread.freeze(False))
        if not await self._is_idle_within(timeout):
            self.abort()
        if not await self._is_idle_within(_GRACE):
            self._fail_all(self._unavailable())

    async def stop(self) -> None:
        """Ends the thread; whoever still waits is told so."""
        self.gate.turn("draining")
        await asyncio.to_thread(self._thread.stop, _GRACE)
        self._fail_all(self._unavailable())

    def _turn(self, gate: State) -> None:
        if self.gate.state == "draining" or not self.is_alive:
            raise self._unavailable()
        self.gate.turn(gate)

    async def _is_idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

    def _take(self, request: Request, deadline: float | None) -> Ticket:
        self._num_taken += 1
        ticket = Ticket(request, self._cancel, self._num_taken)
        self._tickets[request.request_id] = ticket
        if deadline is not None:
            ticket.timer = self._loop.call_later(max(deadline - time.monotonic(), 0), self._expire, ticket)
        self._thread.do(lambda: self._begin(ticket)).add_done_callback(
            lambda taken: self._post(self._fail, ticket, error) if (error := taken.exception()) else None
        )
        return ticket

    def _begin(self, ticket: Ticket) -> None:
        """On the thread."""
        self._num_begun = ticket.number
        self.engine.submit(ticket.request)

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
        return UnavailableError(self.gate.refusal or "The engine does not run.", self._retry_after())

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
                if self.observer is not None:
                    self.observer.delivered(output)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        if self._tickets.get(ticket.request.request_id) is ticket:
            self._close(ticket)
            ticket.put(error)
            if self.observer is not None:
                self.observer.failed(ticket.request.request_id)

    def _fail_all(self, error: Exception, last: int | None = None) -> None:
        """Those that were taken up to number `last`; all for None."""
        for ticket in [one for one in self._tickets.values() if last is None or one.number <= last]:
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
