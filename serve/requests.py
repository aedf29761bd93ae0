"""Requests, checked before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxmask import settings
from jaxmask.checks import check_sampling_mask
from jaxmask.mass import MAX_COLUMNS
from jaxmask.params import NO_TEXT_TO_STOP, SamplingParams, check_integers
from serve.bad_words import with_encoded_bad_words
from serve.config import EngineConfig
from serve.sizes import check_sizes, without_repeats

TokenIds = Sequence[int] | Int[np.ndarray, " S"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can answer.

    Attributes:
      config: its settings.
      vocab_size: ids of the model.
      max_model_len: most tokens of prompt and completion together.
      tokenizer: the model's; None where it has none.
      can_score: whether the model tells log-probabilities of prompts.
    """

    config: EngineConfig
    vocab_size: int
    max_model_len: int
    tokenizer: Any
    can_score: bool

    @property
    def max_logprobs(self) -> int:
        """Most top log-probabilities per token that can be asked for."""
        most, asked = min(self.vocab_size, MAX_COLUMNS), self.config.max_logprobs
        return most if asked == -1 else min(asked, most)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request that can be answered.

    Attributes:
      request_id: its name.
      prompt: its text; None where ids were given.
      prompt_token_ids: at least one id of the vocabulary.
      params: with bad words as ids, and max_tokens such that prompt and completion fit the model.
      returns_mask: whether its completions return their supports.
      is_streamed: whether its tokens are given out as they come.
      cache_salt: what was read of its prompt is kept for requests with the same salt alone.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    returns_mask: bool
    is_streamed: bool = False
    cache_salt: str | None = None

    @classmethod
    def of(
        cls,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams,
        limits: Limits,
        *,
        is_streamed: bool = False,
        text: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """The request, checked.

        Args:
          request_id: its name.
          prompt: text, which gets the model's BOS, or ids.
          params: its settings.
          limits: the engine's.
          is_streamed: give out its tokens as they come.
          text: of a prompt given as ids.
          cache_salt: not empty; None: what was read of the prompt is kept for all that bring no salt.

        Raises:
          ValueError: whatever cannot be answered, with vLLM's texts where it has them.
        """
        text = prompt if isinstance(prompt, str) else text
        token_ids = _prompt_ids(prompt, limits)
        check_sizes(params)
        params = without_repeats(with_encoded_bad_words(params, limits.tokenizer))
        settings.check_request(params, limits.vocab_size)
        _check_logprobs(params, limits)
        if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
            raise ValueError(f"cache_salt must be a non-empty string if provided, got {cache_salt!r}.")
        if params.stop and limits.tokenizer is None:
            raise ValueError(NO_TEXT_TO_STOP)
        config, asked = limits.config, params.return_sampling_mask
        returns_mask = config.return_sampling_mask if asked is None else asked
        if returns_mask:
            check_sampling_mask(params, logprobs_mode=config.logprobs_mode, unbounded_support=config.unbounded_support)
        room = limits.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        params = dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        return cls(request_id, text, token_ids, params, returns_mask, is_streamed, cache_salt)

    @property
    def prompt_key(self) -> tuple[str | None, tuple[int, ...]]:
        """What requests have in common whose prompts are read once for all of them."""
        return self.cache_salt, self.prompt_token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion, at most."""
        return len(self.prompt_token_ids) + (self.params.max_tokens or 0)

    @property
    def top_k(self) -> int | None:
        """Most ids of a returned support; None without a bound."""
        return self.params.top_k if self.params.top_k > 0 else None

    def row_params(self, index: int, seed: int, vocab_size: int) -> SamplingParams:
        """The settings of completion `index` alone, as the sampler takes them."""
        return dataclasses.replace(
            self.params,
            n=1,
            seed=(seed + index) % 2**64,
            top_k=min(self.params.top_k, vocab_size),
            stop=None,
            return_sampling_mask=self.returns_mask,
        )


def _prompt_ids(prompt: str | TokenIds, limits: Limits) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if limits.tokenizer is None:
            raise ValueError("prompts as text need a tokenizer, which this model does not have; pass token ids.")
        token_ids = tuple(limits.tokenizer.encode(prompt, add_special_tokens=True))
    else:
        if isinstance(prompt, Sized):
            # Before a look at each of them, which for millions takes long.
            _check_length(len(prompt), limits)
        token_ids = check_integers("prompt_token_ids", prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)
    _check_length(len(token_ids), limits)
    settings.check_token_ids("prompt_token_ids", token_ids, limits.vocab_size)
    return token_ids


def _check_length(num_tokens: int, limits: Limits) -> None:
    if not num_tokens:
        raise ValueError("The decoder prompt cannot be empty")
    if num_tokens >= limits.max_model_len:
        raise ValueError(
            f"The decoder prompt (length {num_tokens}) is longer than the maximum model length of "
            f"{limits.max_model_len}, which prompt and at least one new token have to fit. Make sure that "
            f"`max_model_len` is no smaller than the number of text tokens."
        )


def _check_logprobs(params: SamplingParams, limits: Limits) -> None:
    if params.prompt_logprobs is not None and not limits.can_score:
        raise ValueError("prompt_logprobs need a model that reads whole rows (`logits`), which this one does not.")
    for kind, asked in (("sample", params.logprobs), ("prompt", params.prompt_logprobs)):
        number = limits.vocab_size if asked == -1 else asked
        if number is not None and number > limits.max_logprobs:
            raise ValueError(
                f"Requested {kind} logprobs of {number}, which is greater than max allowed: {limits.max_logprobs}"
            )
