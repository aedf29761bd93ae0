"""The application: all endpoints, and what lies around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from serve.api import chat, completions, generate, models, tokenization
from serve.api.errors import add_error_handlers
from serve.api.middleware import BodyLimit
from serve.api.service import Service


def create_app(service: Service) -> FastAPI:
    """An ASGI application that starts the service's engine with itself, and stops it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        await service.engine.start()
        yield
        await service.engine.stop()

    app = FastAPI(title="jaxmask", summary="Completions with the support of every token", lifespan=lifespan)
    add_error_handlers(app)
    for endpoints in (generate, completions, chat, models, tokenization):
        app.include_router(endpoints.router(service))
    app.add_middleware(BodyLimit, max_bytes=service.config.max_body_bytes)
    return app
