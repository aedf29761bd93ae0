"""What every request passes before an endpoint sees it."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.errors import ApiError, error_response


class BodyLimit:
    """Refuses bodies that are too large, before they are read to the end."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        """Around an application."""
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 413 where the body is, or says that it is, larger."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = ApiError(
            413, f"The body must have at most {self._max_bytes} bytes.", headers={"Connection": "close"}
        )
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await error_response(too_large)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                # Of this kind, or FastAPI calls it a body that cannot be read.
                raise HTTPException(too_large.status, too_large.message, too_large.headers)
            return message

        await self._app(scope, counted, send)
