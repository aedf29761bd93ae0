"""The application: all endpoints, and what lies around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from serve.api import chat, completions, control, generate, health, models, page, tokenization
from serve.api.errors import add_error_handlers
from serve.api.metrics import Metrics
from serve.api.middleware import ApiKeys, BodyLimit, OwnSite, Watch
from serve.api.service import Service


def create_app(service: Service) -> FastAPI:
    """An ASGI application that starts the service's engine with itself, and stops it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        await service.engine.start()
        yield
        await service.engine.stop()

    metrics = Metrics(service.engine, service.model_name)
    service.engine.observer = metrics
    app = FastAPI(title="jaxmask", summary="Completions with the support of every token", lifespan=lifespan)
    add_error_handlers(app)
    for endpoints in (generate, completions, chat, models, tokenization, page, control):
        app.include_router(endpoints.router(service))
    app.include_router(health.router(service, metrics))
    # The last one is the outermost.
    app.add_middleware(BodyLimit, max_bytes=service.config.max_body_bytes)
    app.add_middleware(OwnSite)
    app.add_middleware(ApiKeys, keys=service.config.api_keys)
    app.add_middleware(
        Watch,
        weight_version=lambda: service.engine.engine.weight_version,
        answered=metrics.answered,
        is_draining=lambda: service.engine.gate.state == "draining",
    )
    return app
