"""Requests, checked before anything runs, and what is known of their completions while these go on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxmask import settings, wire
from jaxmask.checks import check_sampling_mask
from jaxmask.mass import MAX_COLUMNS
from jaxmask.params import NO_TEXT_TO_STOP, SamplingParams, check_integers
from jaxmask.rollout import Finish
from serve.bad_words import with_encoded_bad_words
from serve.config import EngineConfig
from serve.detokenizer import Detokenizer
from serve.outputs import CompletionOutput, FinishReason, SamplingMask
from serve.report import RowLogprobs

TokenIds = Sequence[int] | Int[np.ndarray, " S"]

_REASONS: dict[Finish, FinishReason] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.ERROR: "error",
    Finish.OVERFLOW: "error",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can answer.

    Attributes:
      config: its settings.
      vocab_size: ids of the model.
      max_model_len: most tokens of prompt and completion together.
      tokenizer: the model's; None where it has none.
    """

    config: EngineConfig
    vocab_size: int
    max_model_len: int
    tokenizer: Any

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
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    returns_mask: bool
    is_streamed: bool = False

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
    ) -> Request:
        """The request, checked.

        Args:
          request_id: its name.
          prompt: text, which gets the model's BOS, or ids.
          params: its settings.
          limits: the engine's.
          is_streamed: give out its tokens as they come.
          text: of a prompt given as ids.

        Raises:
          ValueError: whatever cannot be answered, with vLLM's texts where it has them.
        """
        text = prompt if isinstance(prompt, str) else text
        token_ids = _prompt_ids(prompt, limits)
        params = with_encoded_bad_words(params, limits.tokenizer)
        settings.check_request(params, limits.vocab_size)
        _check_logprobs(params, limits)
        if params.stop and limits.tokenizer is None:
            raise ValueError(NO_TEXT_TO_STOP)
        config, asked = limits.config, params.return_sampling_mask
        returns_mask = config.return_sampling_mask if asked is None else asked
        if returns_mask:
            check_sampling_mask(
                params, logprobs_mode=config.logprobs_mode, unbounded_support=config.unbounded_support
            )
        room = limits.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        params = dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        return cls(request_id, text, token_ids, params, returns_mask, is_streamed)

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


class Completion:
    """One completion of a request while it goes on: what was read of it so far.

    Attributes:
      index: which of the request's.
      request: whose it is.
      row_params: its own settings.
      token_ids: so far.
      finish_reason: None while it goes on.
      stop_reason: the stop string or stop id that ended it.
    """

    def __init__(self, index: int, request: Request, row_params: SamplingParams, limits: Limits):
        """A completion without tokens."""
        self.index, self.request, self.row_params = index, request, row_params
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._limits = limits
        self._text = Detokenizer(limits.tokenizer, request.params)
        self._logprobs: list[dict[int, wire.Logprob]] = []
        self._masks: list[SamplingMask] = []
        self._cumulative = 0.0
        self._num_given = 0

    @property
    def needs_host(self) -> bool:
        """Whether each token is looked at soon."""
        return self.request.is_streamed or bool(self.request.params.stop)

    def take(
        self, token_ids: list[int], finish: Finish, mask: SamplingMask | None, logprobs: RowLogprobs | None
    ) -> None:
        """New tokens, as they came from the device; those past a stop string are dropped, with all that is theirs."""
        num_before = self._text.num_tokens
        is_stopped = self._text.push(token_ids, ends_with_stop_id=finish == Finish.STOP)
        num_kept = self._text.num_tokens - num_before
        if finish != Finish.RUNNING and not is_stopped:
            is_stopped = self._text.finish()
        if is_stopped:
            self.finish_reason, self.stop_reason = "stop", self._text.stop_reason
        elif finish != Finish.RUNNING:
            self.finish_reason = _REASONS[finish]
            self.stop_reason = self._stop_id(token_ids[-1]) if finish == Finish.STOP else None
        self.token_ids += token_ids[:num_kept]
        if mask is not None:
            self._masks.append(mask[:num_kept])
        if logprobs is not None:
            self._take_logprobs(np.array(token_ids[:num_kept], np.int32), logprobs)

    def abort(self) -> None:
        """Ends the completion; what was read of it stands."""
        self._text.finish()
        self.finish_reason = "abort"

    def output(self) -> CompletionOutput:
        """All of it."""
        return self._output(self._text.text, 0)

    def delta(self) -> CompletionOutput | None:
        """What came since the last call; None where nothing did."""
        begin, self._num_given = self._num_given, len(self.token_ids)
        text = self._text.delta()
        is_new = text or begin < self._num_given or self.finish_reason is not None
        if not is_new:
            return None
        delta = self._output(text, begin)
        # What was given out is not needed again.
        self._masks, self._logprobs = [], []
        return delta

    def _output(self, text: str, begin: int) -> CompletionOutput:
        has_logprobs = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[begin:],
            cumulative_logprob=self._cumulative if has_logprobs else None,
            logprobs=self._logprobs if has_logprobs else None,
            sampling_mask=SamplingMask.concatenate(self._masks) if self.request.returns_mask else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _stop_id(self, token_id: int) -> int | None:
        """A stop id of the request's own; None for the model's EOS."""
        is_eos = token_id in eos_token_ids(self._limits.tokenizer)
        return None if is_eos and not self.request.params.ignore_eos else token_id

    def _take_logprobs(self, token_ids: np.ndarray, found: RowLogprobs) -> None:
        num = len(token_ids)
        asked = self.request.params.logprobs
        arrays = (found.values[:num], found.ranks[:num], found.top_ids[:num], found.top_values[:num])
        dicts = wire.logprob_dicts(token_ids, *arrays, None if asked == -1 else asked)
        self._logprobs += with_texts(dicts, self._limits.tokenizer if self.request.params.detokenize else None)
        self._cumulative += float(found.values[:num].sum(dtype=np.float64))


def eos_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a completion; none without a tokenizer."""
    return () if tokenizer is None else tuple(tokenizer.eos_token_ids)


def with_texts(dicts: list[dict[int, wire.Logprob]], tokenizer: Any) -> list[dict[int, wire.Logprob]]:
    """The same with each token's text, where there is a tokenizer."""
    if tokenizer is None:
        return dicts
    return [
        {token_id: entry._replace(decoded_token=_text_of(tokenizer, token_id)) for token_id, entry in entries.items()}
        for entries in dicts
    ]


@functools.lru_cache(maxsize=65536)
def _text_of(tokenizer: Any, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _prompt_ids(prompt: str | TokenIds, limits: Limits) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if limits.tokenizer is None:
            raise ValueError("prompts as text need a tokenizer, which this model does not have; pass token ids.")
        token_ids = tuple(limits.tokenizer.encode(prompt, add_special_tokens=True))
    else:
        token_ids = check_integers("prompt_token_ids", prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)
    if not token_ids:
        raise ValueError("The decoder prompt cannot be empty")
    outside = [token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size]
    if outside:
        raise ValueError(
            f"token_id(s) {outside} in prompt_token_ids contain out-of-vocab token ids. Vocabulary size: "
            f"{limits.vocab_size}"
        )
    if len(token_ids) >= limits.max_model_len:
        raise ValueError(
            f"The decoder prompt (length {len(token_ids)}) is longer than the maximum model length of "
            f"{limits.max_model_len}, which prompt and at least one new token have to fit. Make sure that "
            f"`max_model_len` is no smaller than the number of text tokens."
        )
    return token_ids


def _check_logprobs(params: SamplingParams, limits: Limits) -> None:
    for kind, asked in (("sample", params.logprobs), ("prompt", params.prompt_logprobs)):
        number = limits.vocab_size if asked == -1 else asked
        if number is not None and number > limits.max_logprobs:
            raise ValueError(
                f"Requested {kind} logprobs of {number}, which is greater than max allowed: {limits.max_logprobs}"
            )
