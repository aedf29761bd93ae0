"""What callers of the offline API bring, in one form; what cannot be taken is refused by name."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import models
from jaxmask import DraftModel, SamplingParams
from jaxmask.params import check_count
from jaxmask.speculation import Speculation
from serve.config import ngram_speculation
from serve.requests import TokenIds

Prompt = str | TokenIds | Mapping[str, Any]
Message = Mapping[str, Any]
_DRAFT = ("method", "model", "num_speculative_tokens")


def settings_of(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    """The settings of each prompt."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, (list, tuple)):
        raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r:.100}.")
    for index, params in enumerate(sampling_params):
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must hold SamplingParams, got {params!r:.100} at index {index}.")
    if len(sampling_params) != num_prompts:
        raise ValueError(
            f"The lengths of prompts and params must be the same, got {num_prompts} and {len(sampling_params)}."
        )
    return list(sampling_params)


def conversations(messages: Any) -> list[Sequence[Message]]:
    """Many conversations; one that stands alone becomes the only one."""
    is_list = isinstance(messages, (list, tuple))
    many = [messages] if is_list and messages and isinstance(messages[0], Mapping) else messages
    if not is_list or not many:
        raise ValueError(f"messages must be a list of messages, or of such lists, got {messages!r:.100}.")
    for conversation in many:
        is_one = isinstance(conversation, (list, tuple)) and len(conversation) > 0
        for message in conversation if is_one else [conversation]:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"a message must be a mapping with role and content, got {message!r:.100}.")
    return list(many)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Many prompts; one that stands alone becomes the only one. A list of numbers is one prompt."""
    if not isinstance(prompts, (str, Mapping, list, tuple, np.ndarray)):
        raise ValueError(f"prompts must be text, token ids or a list of such, got {prompts!r:.100}.")
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Number)):
        return [prompts]
    return list(prompts)


def dtype_of(dtype: DTypeLike) -> DTypeLike:
    """The dtype of weights; float32 for "auto"."""
    return jnp.float32 if isinstance(dtype, str) and dtype == "auto" else jnp.dtype(dtype)


def generation_defaults(generation_config: str | Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The content of a generation_config.json; empty for "vllm"."""
    if isinstance(generation_config, Mapping):
        return dict(generation_config)
    if generation_config not in ("auto", "vllm"):
        raise ValueError(f"generation_config must be 'auto', 'vllm' or a mapping, got {generation_config!r}.")
    is_own = generation_config == "auto" and tokenizer is not None
    return dict(tokenizer.generation_defaults) if is_own else {}


def speculation_of(settings: Mapping[str, Any], dtype: DTypeLike) -> Speculation:
    """What vLLM's speculative_config means."""
    method = settings.get("method") if isinstance(settings, Mapping) else None
    if method == "ngram":
        return ngram_speculation(settings)
    if method != "draft_model" or "model" not in settings or set(settings) - set(_DRAFT):
        raise ValueError(
            f"speculative_config must have the method 'ngram', or 'draft_model' with {', '.join(_DRAFT[1:])}, got "
            f"{settings!r:.200}."
        )
    model = settings["model"]
    draft = models.load(model, dtype_of(dtype))[0] if isinstance(model, (str, Path)) else model
    num_tokens = check_count("num_speculative_tokens", settings.get("num_speculative_tokens", 4))
    return DraftModel(draft, num_tokens=num_tokens)
