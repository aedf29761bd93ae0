"""What learners steer the server with, in vLLM's shapes: pauses, new weights, sleep."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from serve.api.answers import json_response
from serve.api.errors import ApiError, bad_request
from serve.api.fields import Body, about
from serve.api.service import Service
from serve.async_engine import AsyncEngine, PauseMode
from serve.control import Control

PATHS = (
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/update_weights",
    "/update_weight_version",
    "/weight_info",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reset_prefix_cache",
    "/get_world_size",
)
_REFUSAL = "This server does not let clients steer it. Restart with --enable-rl-endpoints to allow it."
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
# What the endpoints put around a client's own name of a request.
_OWN_NAME = re.compile(r"(?:generate-tokens|cmpl|chatcmpl)-(.*)", re.DOTALL)
_MAX_VERSION = 128


class AbortBody(Body):
    """Requests to end; without names, all of them."""

    request_ids: list[str] | None = None


class UpdateBody(Body):
    """New weights."""

    path: str = Field(description="Folder on the server's machine: the hub's layout, or Orbax; or a GGUF file.")
    weight_version: str | None = about("Their name; the number after the one before.")
    mode: PauseMode | None = about("What becomes of requests that run: abort, wait or keep; abort.")


class VersionBody(Body):
    """Another name for the weights."""

    new_version: str


def router(service: Service) -> APIRouter:
    """The endpoints; each answers 403 where the server was not started with them."""
    if not service.config.enable_rl_endpoints:
        return _refused()
    routes = APIRouter(tags=["control"])
    control = Control(service.engine)
    _add_pauses(routes, service.engine, control)
    _add_weights(routes, service.engine, control)
    _add_sleep(routes, control)
    return routes


def _refused() -> APIRouter:
    routes = APIRouter()

    async def refuse() -> Response:
        raise ApiError(403, _REFUSAL)

    for path in PATHS:
        routes.add_api_route(path, refuse, methods=_METHODS, include_in_schema=False)
    return routes


def _add_pauses(routes: APIRouter, engine: AsyncEngine, control: Control) -> None:
    @routes.post("/pause", summary="Stop: end requests, answer them first, or keep them as they are")
    async def pause(mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
        # As in vLLM, where it does nothing any more: weights that are replaced take the cache with them.
        del clear_cache
        await control.pause(mode)
        return json_response({"status": "paused"})

    @routes.post("/resume", summary="Go on")
    async def resume() -> Response:
        await control.resume()
        return json_response({"status": "resumed"})

    @routes.get("/is_paused", summary="Whether nothing runs")
    async def is_paused() -> Response:
        return json_response({"is_paused": engine.gate.state not in ("open", "draining")})

    @routes.post("/abort_requests", summary="End requests; each is answered with what it has")
    async def abort_requests(body: AbortBody | None = None) -> Response:
        wanted = None if body is None else body.request_ids
        num_ended = engine.abort(None if wanted is None else _named(engine.request_ids, wanted))
        return json_response({"status": "aborted", "aborted": num_ended})


def _add_weights(routes: APIRouter, engine: AsyncEngine, control: Control) -> None:
    @routes.post("/update_weights", summary="Replace the weights; the old ones serve on where the new are refused")
    async def update_weights(body: UpdateBody) -> Response:
        version = None if body.weight_version is None else _checked(body.weight_version, "weight_version")
        with _unreadable():
            name = await control.update(body.path, version, body.mode or "abort")
        return json_response({"message": "Weights updated", "weight_version": name})

    @routes.post("/update_weight_version", summary="Give the weights another name")
    async def update_weight_version(body: VersionBody) -> Response:
        version = _checked(body.new_version, "new_version")
        await control.rename(version)
        return json_response({"success": True, "new_version": version})

    @routes.get("/weight_info", summary="The name of the weights")
    async def weight_info() -> Response:
        return json_response({"weight_version": engine.engine.weight_version})

    @routes.post("/reset_prefix_cache", summary="Forget what was read of prompts")
    async def reset_prefix_cache() -> Response:
        return json_response({"success": await engine.call(lambda one: one.reset_prefix_cache())})

    @routes.get("/get_world_size", summary="Processes that have to get new weights: 1")
    async def get_world_size() -> Response:
        return json_response({"world_size": 1})


def _add_sleep(routes: APIRouter, control: Control) -> None:
    @routes.post("/sleep", summary="Give the device's memory away; weights go to the host (1) or are dropped (2)")
    async def sleep(level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Literal["abort", "wait"] = "abort") -> Response:
        await control.sleep(1 if level == 1 else 2, mode)
        return json_response({"status": "sleeping", "level": level})

    @routes.post("/wake_up", summary="Take the device's memory back: all, or what is named")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        with bad_request():
            is_awake = await control.wake_up(tags or ())
        return json_response({"status": "awake" if is_awake else "sleeping", "tags": tags})

    @routes.get("/is_sleeping", summary="Whether a part of the server sleeps")
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": control.is_sleeping})


def _named(open_names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Requests by the engine's name or the client's own; of several prompts of one request, all."""
    asked = set(wanted)
    named = []
    for name in open_names:
        own = match[1] if (match := _OWN_NAME.fullmatch(name)) else name
        # cmpl-NAME-0, cmpl-NAME-1, ...
        of_several = own.rpartition("-")[0] if name.startswith("cmpl-") else own
        if not asked.isdisjoint((name, own, of_several, f"cmpl-{of_several}")):
            named.append(name)
    return named


def _checked(version: str, field: str) -> str:
    """A name of weights that can stand in a header; raises ApiError 400."""
    if not (version.isascii() and version.isprintable() and 0 < len(version.strip()) == len(version) <= _MAX_VERSION):
        allowed = f"1 to {_MAX_VERSION} printable ASCII characters without spaces around them"
        raise ApiError(400, f"{field} must be {allowed}, got {version!r:.200}.", field)
    return version


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    """Turns what is wrong with files into a 404 or a 400 of its text."""
    try:
        yield
    except FileNotFoundError as error:
        raise ApiError(404, str(error), "path") from None
    except (ValueError, OSError) as error:
        raise ApiError(400, str(error), "path") from None
