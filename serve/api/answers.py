"""From checked requests to responses: whole or streamed, and given up when the client hangs up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from jaxmask import SamplingParams
from serve.api.errors import ApiError, as_api_error, bad_request, error_body
from serve.api.service import Service
from serve.outputs import RequestOutput
from serve.requests import Request, TokenIds
from serve.tickets import Ticket, UnavailableError

Result = TypeVar("Result")
CLIENT_GONE = 499


def check(
    service: Service,
    request_id: str,
    token_ids: TokenIds,
    params: SamplingParams,
    *,
    is_streamed: bool,
    text: str | None = None,
    cache_salt: str | None = None,
) -> Request:
    """A request that can be answered; raises ApiError 400 where it cannot."""
    with bad_request():
        return service.engine.engine.check(
            request_id, token_ids, params, is_streamed=is_streamed, text=text, cache_salt=cache_salt
        )


def submit(service: Service, requests: Sequence[Request], timeout: float | None) -> list[Ticket]:
    """Tickets of requests, all or none; raises ApiError 400, or what `AsyncEngine.submit` raises.

    Args:
      service: the server's.
      requests: checked.
      timeout: seconds that the client asked for; the server's own limit holds as well.
    """
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ApiError(400, f"timeout must be in (0, inf) seconds, got {timeout}.", "timeout")
    limits = [seconds for seconds in (timeout, service.config.request_timeout) if seconds is not None]
    with bad_request():
        return service.engine.submit(requests, deadline=time.monotonic() + min(limits) if limits else None)


async def whole(tickets: Sequence[Ticket]) -> list[RequestOutput]:
    """What came of all of them; given up together.

    Raises:
      UnavailableError: a deadline passed before anything was drawn.
    """
    try:
        outputs = [await ticket.result() for ticket in tickets]
    finally:
        for ticket in tickets:
            ticket.cancel()
    for ticket, output in zip(tickets, outputs, strict=True):
        if ticket.is_late and not any(completion.token_ids for completion in output.outputs):
            raise UnavailableError("The request's time was over before its first token.", 1)
    return outputs


async def streamed(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Deltas of all of them as they come, each with its ticket's number; given up together."""
    arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

    async def pass_on(number: int, ticket: Ticket) -> None:
        try:
            async for output in ticket:
                arrived.put_nowait((number, output))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.ensure_future(pass_on(number, ticket)) for number, ticket in enumerate(tickets)]
    try:
        num_going = len(tasks)
        while num_going:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_going -= 1
            else:
                yield item
    finally:
        for task, ticket in zip(tasks, tickets, strict=True):
            task.cancel()
            ticket.cancel()


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work returns; it is cancelled where the client hangs up before. Raises ApiError then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_GONE, "The client has hung up.")
        return task.result()
    finally:
        await _end(task, gone)


def json_response(content: Any) -> Response:
    """Strict JSON: a number that is not finite becomes null."""
    return Response(to_json(content, inf_nan_mode="null"), media_type="application/json")


class EventStream(Response):
    """Server-sent events, the last of which is [DONE]; ends its source when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], tickets: Sequence[Ticket]):
        """A stream of JSON objects; one that fails ends with an error object.

        Args:
          events: the objects, an async generator.
          tickets: what they are made of; ended with the stream.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._tickets = events, tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        del scope
        sending, gone = asyncio.ensure_future(self._send_all(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _end(sending, gone)
            for ticket in self._tickets:
                ticket.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._source():
            body = b"data: " + event + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _source(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                yield to_json(event, inf_nan_mode="null")
        except Exception as error:
            failure = as_api_error(error)
            yield to_json(error_body(failure.status, failure.message, failure.param))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
