"""Whether the server lives, what it is, and what it has done."""

from __future__ import annotations

from fastapi import APIRouter, Response

import jaxmask
from serve.api.answers import json_response
from serve.api.metrics import Metrics
from serve.api.service import Service
from serve.tickets import UnavailableError


def router(service: Service, metrics: Metrics) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(tags=["server"])
    engine = service.engine

    def health() -> Response:
        if engine.gate.state == "draining":
            raise UnavailableError("The server is shutting down.", 1)
        if not engine.is_alive:
            raise UnavailableError("The engine does not run.", 1)
        return Response()

    # On the loop, like all that reads its accounts.
    @routes.get("/health", summary="200 while requests can be answered, also after a pause or sleep; else 503")
    async def get_health() -> Response:
        return health()

    @routes.head("/health", include_in_schema=False)
    async def head_health() -> Response:
        return health()

    @routes.get("/ping", summary="As /health")
    async def get_ping() -> Response:
        return health()

    @routes.post("/ping", summary="As /health")
    async def post_ping() -> Response:
        return health()

    @routes.get("/version", summary="The server's version")
    async def version() -> Response:
        return json_response({"version": jaxmask.__version__})

    @routes.get("/load", summary="Completions that run or wait")
    async def load() -> Response:
        return json_response({"server_load": engine.num_open})

    @routes.get("/metrics", summary="Metrics as Prometheus reads them")
    async def get_metrics() -> Response:
        return Response(metrics.text(), media_type=metrics.media_type)

    return routes
