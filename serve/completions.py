"""What is known of completions while these go on: ids, text, log-probabilities, supports."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxmask import wire
from jaxmask.params import SamplingParams
from jaxmask.rollout import Finish
from serve.detokenizer import Detokenizer
from serve.outputs import CompletionOutput, FinishReason, SamplingMask, WeightSpan
from serve.report import RowLogprobs
from serve.requests import Limits, Request
from serve.texts import with_texts

_REASONS: dict[Finish, FinishReason] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.ERROR: "error",
    Finish.OVERFLOW: "error",
}


class Completion:
    """One completion of a request while it goes on: what was read of it so far.

    Attributes:
      index: which of the request's.
      request: whose it is.
      row_params: its own settings.
      token_ids: so far.
      finish_reason: None while it goes on.
      stop_reason: the stop string or stop id that ended it.
      num_cached_tokens: of its prompt, that had been read before; None where nothing is kept.
    """

    def __init__(self, index: int, request: Request, row_params: SamplingParams, limits: Limits):
        """A completion without tokens."""
        self.index, self.request, self.row_params = index, request, row_params
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = None
        self._spans: list[WeightSpan] = []
        self._limits = limits
        self._text = Detokenizer(limits.tokenizer, request.params)
        self._logprobs: list[dict[int, wire.Logprob]] = []
        self._masks: list[SamplingMask] = []
        self._cumulative = 0.0
        self._num_given = 0
        self._is_given = False

    @property
    def needs_host(self) -> bool:
        """Whether each token is looked at soon."""
        return self.request.is_streamed or bool(self.request.params.stop)

    def take(
        self,
        token_ids: list[int],
        finish: Finish,
        mask: SamplingMask | None,
        logprobs: RowLogprobs | None,
        weight_version: str,
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
        if num_kept:
            self._take_version(weight_version, num_kept)
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
        has_ended = self.finish_reason is not None and not self._is_given
        if not (text or begin < self._num_given or has_ended):
            return None
        self._is_given = has_ended
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
            weight_versions=[span._replace(start=max(span.start, begin)) for span in self._spans if span.end > begin],
        )

    def _stop_id(self, token_id: int) -> int | None:
        """A stop id of the request's own; None for the model's EOS."""
        is_eos = token_id in eos_token_ids(self._limits.tokenizer)
        return None if is_eos and not self.request.params.ignore_eos else token_id

    def _take_version(self, version: str, num_tokens: int) -> None:
        """Whose the last tokens are."""
        end = len(self.token_ids)
        start = end - num_tokens
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._spans.append(WeightSpan(version, start, end))

    def _take_logprobs(self, token_ids: np.ndarray, found: RowLogprobs) -> None:
        num = len(token_ids)
        asked = self.request.params.logprobs
        top_ids, top_values = found.top_ids[:num], found.top_values[:num]
        most = None if asked == -1 else asked
        dicts = wire.logprob_dicts(token_ids, found.values[:num], found.ranks[:num], top_ids, top_values, most)
        self._logprobs += with_texts(dicts, self._limits.tokenizer if self.request.params.detokenize else None)
        self._cumulative += float(found.values[:num].sum(dtype=np.float64))


def eos_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a completion; none without a tokenizer."""
    return () if tokenizer is None else tuple(tokenizer.eos_token_ids)
