"""Texts to ids and back, without the model: vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from serve.api.answers import json_response
from serve.api.conversations import MESSAGES_SCHEMA, TemplateFields, render
from serve.api.errors import ApiError
from serve.api.fields import Body, about
from serve.api.prompts import encode, off_loop_if_long, require_tokenizer
from serve.api.service import Service, check_model


class TokenizeBody(TemplateFields):
    """A text or a conversation."""

    model: str | None = about("A name of /v1/models.")
    prompt: str | None = about("A text.")
    messages: Annotated[
        list[dict[str, Any]] | None,
        Field(default=None, min_length=1, json_schema_extra=MESSAGES_SCHEMA, description="Instead of a text."),
    ]
    add_special_tokens: bool | None = about("Put the model's BOS first; true for a text, false for messages.")
    return_token_strs: bool | None = about("Return the text of each token; false.")


class DetokenizeBody(Body):
    """Ids."""

    model: str | None = about("A name of /v1/models.")
    tokens: Annotated[list[int], Field(description="Ids of the vocabulary.")]


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize", summary="The ids of a text or of a conversation")
    async def tokenize(body: TokenizeBody) -> Response:
        check_model(service, body.model)
        token_ids = await _token_ids(service, body)
        texts = None
        if body.return_token_strs:
            texts = await off_loop_if_long(len(token_ids), lambda: _texts(service, token_ids))
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": service.engine.engine.limits.max_model_len,
                "tokens": token_ids,
                "token_strs": texts,
            }
        )

    @routes.post("/detokenize", summary="The text of ids")
    async def detokenize(body: DetokenizeBody) -> Response:
        check_model(service, body.model)
        tokenizer = require_tokenizer(service, "detokenize")
        vocab_size = service.engine.engine.limits.vocab_size
        outside = [token_id for token_id in body.tokens if not 0 <= token_id < vocab_size]
        if outside:
            raise ApiError(400, f"tokens must be in [0, {vocab_size}), got {str(outside[:10])[1:-1]}.", "tokens")
        text = await off_loop_if_long(
            len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return json_response({"prompt": text})

    return routes


async def _token_ids(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "either prompt or messages must be given, and not both.", "prompt")
    if body.messages is not None:
        return (await render(service, body.messages, body, bool(body.add_special_tokens))).token_ids
    assert body.prompt is not None
    return await encode(service, body.prompt, body.add_special_tokens is not False)


def _texts(service: Service, token_ids: list[int]) -> list[str]:
    return [service.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]
