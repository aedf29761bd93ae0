"""Every error as OpenAI's JSON object, with the status that clients know what to do with."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from jaxmask import SamplingParams
from serve.tickets import ConflictError, EngineError, NotTakenError, OverloadedError

LOG = logging.getLogger("serve")
_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} | {"request_id"}
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
      status: of HTTP.
      message: for whoever asked.
      param: the field at fault, where it is one.
      headers: of the response.
    """

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        """An error."""
        # Whatever came in a request may be in it; a response holds whole characters alone.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": status}}


def error_type(status: int) -> str:
    """OpenAI's name for errors of a status of HTTP."""
    return _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")


def as_api_error(error: Exception) -> ApiError:
    """The same error as an answer; one that nobody expected is logged, and only called internal."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NotTakenError):
        status = 429 if isinstance(error, OverloadedError) else 503
        return ApiError(status, error.message, headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, ConflictError):
        return ApiError(409, str(error))
    if not isinstance(error, EngineError):
        LOG.error("an endpoint failed", exc_info=error)
    return ApiError(500, "Internal server error")


@contextlib.contextmanager
def bad_request() -> Iterator[None]:
    """Turns a ValueError, with which the code inside refuses what was asked, into a 400 of its text."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        raise ApiError(400, message, _named_field(message)) from None


def add_error_handlers(app: FastAPI) -> None:
    """Lets every failure of an endpoint end in an error object."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (ApiError, NotTakenError, ConflictError, EngineError, Exception):
        app.add_exception_handler(kind, _failed)


def error_response(error: ApiError) -> Response:
    """The response of an error."""
    # ASCII: a text may quote what was sent, with characters that UTF-8 does not have.
    text = json.dumps(error_body(error.status, error.message, error.param))
    return Response(text, error.status, error.headers, media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    del request
    return error_response(as_api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))


async def _invalid(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    if first["type"] == "json_invalid":
        return error_response(ApiError(400, f"The body is not JSON: {first['ctx']['error']} at {first['loc'][-1]}."))
    if first["type"] == "value_error":
        return error_response(ApiError(400, f"{first['ctx']['error']}.", param))
    value = "" if first["type"] == "missing" else f", got {first['input']!r:.100}"
    return error_response(ApiError(400, f"{param or 'body'}: {first['msg']}{value}.", param))


def _named_field(message: str) -> str | None:
    """The field that a text of ours begins with."""
    word = message.split(maxsplit=1)[0] if message else ""
    return word if word in _FIELDS else None
