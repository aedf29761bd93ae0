"""What every request passes before an endpoint sees it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.errors import ApiError, as_api_error, error_response


class Watch:
    """Around all else: every response says which weights the server has, and failures nobody caught become a 500."""

    def __init__(
        self,
        app: ASGIApp,
        weight_version: Callable[[], str],
        answered: Callable[[int], None],
        is_draining: Callable[[], bool],
    ):
        """Around an application.

        Args:
          app: the application.
          weight_version: the name of the weights, printable ASCII.
          answered: called with the status of each response.
          is_draining: whether connections are to end with their responses.
        """
        self._app, self._weight_version, self._answered, self._is_draining = app, weight_version, answered, is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the application's response and the header X-Weight-Version."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._answered(message["status"])
                own = [(b"x-weight-version", self._weight_version().encode())]
                # Or the client would send its next request on a connection that is about to be closed.
                own += [(b"connection", b"close")] if self._is_draining() else []
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if has_begun:
                raise
            await error_response(as_api_error(error))(scope, receive, watched)


class ApiKeys:
    """Lets those in who bring a key: as `Authorization: Bearer KEY`, or as the password of a browser's prompt."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        """Around an application; without keys all are let in."""
        self._app = app
        # Of one length: how long a comparison takes says nothing about the keys.
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 where no key, or another one, was brought."""
        if scope["type"] == "lifespan" or not self._digests or self._is_known(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _ask_for_key(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_known(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [_digest(_key_in(value)) for name, value in headers if name == b"authorization"]
        # All are compared, whichever is the right one.
        return sum(hmac.compare_digest(one, digest) for one in given for digest in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key_in(authorization: bytes) -> bytes:
    """The key in a header; b"" where there is none, which no key is."""
    scheme, _, rest = authorization.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


async def _ask_for_key(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(ApiError(401, "This server needs an API key: Authorization: Bearer KEY."))
    for challenge in ('Basic realm="jaxmask", charset="UTF-8"', 'Bearer realm="jaxmask"'):
        response.headers.append("WWW-Authenticate", challenge)
    await response(scope, receive, send)


class OwnSite:
    """Refuses what a page of another site lets a browser send, with the key that the browser may remember."""

    def __init__(self, app: ASGIApp):
        """Around an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 403 to requests of other sites that may change something."""
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS") and _is_foreign(scope):
            refusal = ApiError(403, "Requests that come from pages of other sites are refused.")
            await error_response(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_foreign(scope: Scope) -> bool:
    return any(name == b"sec-fetch-site" and value == b"cross-site" for name, value in scope["headers"])


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
