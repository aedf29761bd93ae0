"""Prompts of OpenAI's endpoints: one or many, as texts or as ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxmask import SamplingParams
from serve.api.answers import check
from serve.api.errors import ApiError, bad_request
from serve.api.openai_fields import OpenAIFields
from serve.api.service import Service
from serve.requests import Request

Result = TypeVar("Result")
_MAX_SIZE_ON_LOOP = 2000


def listed_prompts(prompt: Any) -> list[str | list[int]]:
    """All prompts of a request, each a text or a list of ids.

    Raises:
      ValueError: it is none, with what one looks like.
    """
    if isinstance(prompt, str) or _are(prompt, int):
        return [prompt]
    if _are(prompt, str) or (isinstance(prompt, list) and prompt and all(_are(one, int) for one in prompt)):
        return prompt
    raise ValueError(f"prompt must be a text, a list of token ids, or a list of such, none empty, got {prompt!r:.100}")


def require_tokenizer(service: Service, what: str) -> Any:
    """The model's tokenizer; raises ApiError 400 where it has none."""
    if service.tokenizer is None:
        raise ApiError(400, f"{what} needs a tokenizer, which this model does not have.")
    return service.tokenizer


async def off_loop_if_long(size: int, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises; done on another thread where that takes long, while others are served.

    Args:
      size: characters or ids that it reads.
      work: safe to do on any thread.
    """
    return await asyncio.to_thread(work) if size > _MAX_SIZE_ON_LOOP else work()


async def encode(service: Service, text: str, add_special_tokens: bool) -> list[int]:
    """The ids of a text; raises ApiError 400 where it has none."""
    tokenizer = require_tokenizer(service, "text")
    with bad_request():
        return await off_loop_if_long(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))


async def checked_requests(
    service: Service,
    name: str,
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    fields: OpenAIFields,
) -> list[Request]:
    """Requests that can be answered, one for each prompt; raises ApiError 400 where one cannot.

    Args:
      service: the server's.
      name: of the only one; of several, each gets its number.
      prompts: texts or ids.
      params: of each.
      fields: of the request: whether it is streamed, whether texts get the model's BOS, whose cache they share.
    """
    most = service.engine.max_waiting + service.engine.engine.config.max_num_seqs
    if len(prompts) * params.n > most:
        raise ApiError(400, f"n must be at most {most} over all prompts together, got {len(prompts) * params.n}.", "n")
    requests = []
    for number, prompt in enumerate(prompts):
        own_name = name if len(prompts) == 1 else f"{name}-{number}"
        text = None
        if isinstance(prompt, str):
            text = prompt
            prompt = await encode(service, prompt, fields.add_special_tokens is not False)
        request = check(
            service,
            own_name,
            prompt,
            params,
            is_streamed=bool(fields.stream),
            text=text,
            cache_salt=fields.cache_salt,
        )
        requests.append(request)
    return requests


def _are(values: Any, kind: type) -> bool:
    """Whether this is a list of some values, all of exactly this type."""
    return isinstance(values, list) and len(values) > 0 and all(type(value) is kind for value in values)
