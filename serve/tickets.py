"""A request on its way through a `Worker`, and the reasons for which one is not taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol, runtime_checkable

from serve.outputs import RequestOutput
from serve.requests import Request


class NotTakenError(Exception):
    """A request that is not taken now.

    Attributes:
      message: why.
      retry_after: seconds after which another try makes sense.
    """

    def __init__(self, message: str, retry_after: int):
        """A refusal."""
        super().__init__(message)
        self.message, self.retry_after = message, retry_after


class OverloadedError(NotTakenError):
    """Too many wait already."""


class UnavailableError(NotTakenError):
    """Nothing is taken for now."""


class ConflictError(Exception):
    """What is asked for does not go with what the server is doing, or was asked to do meanwhile."""


class EngineError(Exception):
    """The engine failed while it answered."""


@runtime_checkable
class Observer(Protocol):
    """Is told what came of requests, on the event loop; it must not raise."""

    def delivered(self, output: RequestOutput) -> None:
        """An output went to whoever waits for it."""
        ...

    def failed(self, request_id: str) -> None:
        """A request ended by an error of the engine, or because the server stops."""
        ...


class Ticket:
    """A request that was taken; iterate over it for what comes. All on the event loop.

    Attributes:
      request: the request.
      number: how many requests were taken up to this one.
      taken_at: when, in `time.monotonic()`.
      is_late: its deadline has passed.
      timer: what ends it then; None without a deadline.
    """

    def __init__(self, request: Request, cancel: Callable[[Ticket], None], number: int):
        """A ticket nothing has come for."""
        self.request, self.number = request, number
        self.taken_at = time.monotonic()
        self.is_late = False
        self.timer: asyncio.TimerHandle | None = None
        self._cancel = cancel
        self._arrived: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, arrived: RequestOutput | Exception) -> None:
        """Takes what came: an output, or what went wrong, which is the last."""
        self._arrived.put_nowait(arrived)

    def cancel(self) -> None:
        """Ends the request, if it goes on; nothing is waited for."""
        self._cancel(self)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """What comes, up to the output that is finished; raises what went wrong. Left early, it ends the request."""
        try:
            while True:
                arrived = await self._arrived.get()
                if isinstance(arrived, Exception):
                    raise arrived
                yield arrived
                if arrived.finished:
                    return
        finally:
            self.cancel()

    async def result(self) -> RequestOutput:
        """The last output: all of a request that is not streamed."""
        outputs = [output async for output in self]
        return outputs[-1]
