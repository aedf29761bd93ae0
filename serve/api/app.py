"""The application: all endpoints, and what lies around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from serve.api import generate, page
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
    app.include_router(generate.router(service))
    app.include_router(page.router(service))
    app.add_middleware(BodyLimit, max_bytes=service.config.max_body_bytes)
    return app
