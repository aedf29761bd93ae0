"""The names of the model: OpenAI's `/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from serve.api.answers import json_response
from serve.api.service import Service, check_model


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])

    @routes.get("/models", summary="The names by which the model may be called")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [_card(service, name) for name in service.config.model_names]})

    # Names may be paths of a hub.
    @routes.get("/models/{name:path}", summary="One of the names")
    async def show_model(name: str) -> Response:
        check_model(service, name)
        return json_response(_card(service, name))

    return routes


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "jaxmask",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.engine.engine.limits.max_model_len,
        "permission": [],
    }
