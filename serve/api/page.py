"""The page at `/`: one file that needs nothing from elsewhere, and the few questions it asks besides generating.

The page itself holds nothing of the model, so it may be shown to anybody; what it asks goes the way of all requests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from serve.api.answers import json_response
from serve.api.errors import ApiError, bad_request
from serve.api.fields import Body, about
from serve.api.service import Service

PAGE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class PromptBody(Body):
    """A text to make a prompt of."""

    text: str
    chat: bool | None = about("As a user's message in the model's chat template; false: as it is, behind the BOS.")


class TextsBody(Body):
    """Ids to be read."""

    token_ids: list[int]
    after: list[int] | None = about("The ids before them, which they go on from; null: each id is read alone.")
    is_last: bool | None = about("No more ids come: half a character at the end is written out.")


def router(service: Service) -> APIRouter:
    """The page, and the endpoints that only it uses."""
    routes = APIRouter(tags=["page"])
    html = PAGE.read_text(encoding="utf-8")
    headers = page_headers(html)

    @routes.get("/", summary="A page to try the model on", response_class=HTMLResponse)
    async def page() -> Response:
        return HTMLResponse(html, headers=headers)

    @routes.get("/page/model", summary="What the page shows of the model")
    async def model() -> Response:
        return json_response(described(service))

    # Not coroutines: long texts are read on other threads.
    @routes.post("/page/prompt", summary="Token ids of a prompt")
    def prompt(body: PromptBody) -> Response:
        with bad_request():
            return json_response({"token_ids": _encoded(_tokenizer(service), body)})

    @routes.post("/page/texts", summary="Texts of token ids, one for each")
    def texts(body: TextsBody) -> Response:
        before = body.after or []
        _check_ids([*before, *body.token_ids], service.engine.engine.limits.vocab_size)
        tokenizer = _tokenizer(service)
        if body.after is None:
            alone = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in body.token_ids]
            return json_response({"texts": alone})
        return json_response({"texts": _pieces(tokenizer, before, body.token_ids, is_last=bool(body.is_last))})

    return routes


def page_headers(html: str) -> dict[str, str]:
    """Headers under which a browser runs nothing but the page's own script, and speaks to nobody but its server."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(hashes['script'])}",
        f"style-src {' '.join(hashes['style'])}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text can become markup, whatever the script does with it.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def described(service: Service) -> dict[str, Any]:
    """What the page shows of the model, and what it can ask for."""
    limits = service.engine.engine.limits
    return {
        "name": service.model_name,
        "vocab_size": limits.vocab_size,
        "max_model_len": limits.max_model_len,
        "has_tokenizer": service.tokenizer is not None,
        "has_chat_template": _has_chat_template(service.tokenizer),
        "return_sampling_mask": limits.config.return_sampling_mask,
        "logprobs_mode": limits.config.logprobs_mode,
        "max_logprobs": limits.max_logprobs,
    }


def _tokenizer(service: Service) -> Any:
    if service.tokenizer is None:
        raise ApiError(400, "This model has no tokenizer; give token ids.")
    return service.tokenizer


def _has_chat_template(tokenizer: Any) -> bool:
    try:
        return tokenizer is not None and bool(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]))
    except ValueError:
        return False


def _encoded(tokenizer: Any, body: PromptBody) -> list[int]:
    if body.chat:
        # The template writes its own BOS.
        return tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": body.text}]))
    return tokenizer.encode(body.text, add_special_tokens=True)


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ApiError(400, f"token_ids must be in [0, {vocab_size}), got {token_id}.", "token_ids")


def _pieces(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int], *, is_last: bool) -> list[str]:
    """The text each id adds to those before it; a character of several ids belongs to its last one."""
    stream = tokenizer.stream(skip_special_tokens=False)
    stream.push(before)
    pieces = [stream.push([token_id]) for token_id in token_ids]
    if is_last and pieces:
        pieces[-1] += stream.finish()
    return pieces
