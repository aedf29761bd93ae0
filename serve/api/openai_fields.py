"""Fields that both of OpenAI's completion endpoints take, with vLLM's additions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmask import SamplingParams
from serve.api.fields import SamplingFields, StreamOptions, about, sampling_params
from serve.api.masks import MaskFormat
from serve.api.service import Service, new_id

_NO_EFFECT = "Taken, and without effect."


class OpenAIFields(SamplingFields):
    """How to sample, and what comes back."""

    model: str | None = about("A name of /v1/models.")
    prompt_logprobs: int | None = about("Likeliest tokens to report for each prompt token; -1: all.", minimum=-1)
    stream: bool | None = about("Server-sent events, one for each few tokens of a choice.")
    stream_options: StreamOptions | None = None
    request_id: str | None = about("Part of the response's id; a new one where left out.")
    timeout: float | None = about("Seconds after which the request ends with what it has.", exclusiveMinimum=0)
    cache_salt: str | None = about("Prompts share their caches with prompts of the same salt only.")
    return_token_ids: bool | None = about("Return the ids of prompt and choices.")
    return_tokens_as_token_ids: bool | None = about('Write the tokens of log-probabilities as "token_id:17".')
    add_special_tokens: bool | None = about("Put the model's BOS before a text.")
    sampling_mask_format: MaskFormat | None = about("lists: one list for each token; base64: two arrays.")
    user: Any = about(_NO_EFFECT)
    metadata: Any = about(_NO_EFFECT)
    store: Any = about(_NO_EFFECT)
    service_tier: Any = about(_NO_EFFECT)
    safety_identifier: Any = about(_NO_EFFECT)
    prompt_cache_key: Any = about(_NO_EFFECT)

    def params(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """The settings of the request; raises ApiError 400 where one is out of range.

        Args:
          defaults: of fields that were left out.
          own: what only the endpoint knows the name of; None where it was left out.
        """
        given = {"prompt_logprobs": self.prompt_logprobs, **own}
        return sampling_params(self, defaults, **{name: value for name, value in given.items() if value is not None})

    def name(self, prefix: str) -> str:
        """The response's id."""
        return f"{prefix}-{new_id() if self.request_id is None else self.request_id}"


def response_head(service: Service, name: str, kind: str) -> dict[str, Any]:
    """What responses and events begin with.

    Args:
      service: the server's.
      name: the response's id.
      kind: OpenAI's name of the object.
    """
    return {"id": name, "object": kind, "created": service.now(), "model": service.model_name}
