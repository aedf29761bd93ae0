"""A request while it is being answered: its completions, its prompt's log-probabilities, and when what happened."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jaxmask.params import SamplingParams
from serve.completions import Completion
from serve.config import derived_seeds
from serve.outputs import RequestMetrics, RequestOutput
from serve.prompt_scores import PromptScores
from serve.requests import Limits, Request


class Answer:
    """A request that is being answered: its completions.

    Attributes:
      request: the request.
      completions: by index.
    """

    def __init__(self, request: Request, rows: Sequence[SamplingParams], limits: Limits):
        """Completions without tokens, one for each of the settings; now is when it arrived."""
        self.request = request
        self.completions = [Completion(index, request, row, limits) for index, row in enumerate(rows)]
        self._metrics = RequestMetrics(time.monotonic())
        self._scores = None if request.params.prompt_logprobs is None else PromptScores(request, limits)

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.finish_reason is not None for completion in self.completions)

    def scheduled(self, model: Any) -> None:
        """One of the completions has a slot.

        Asks the device for log-probabilities of the prompt, where they are wanted; nothing waits for them.
        """
        if self._metrics.first_scheduled_time is None:
            self._metrics = dataclasses.replace(self._metrics, first_scheduled_time=time.monotonic())
        if self._scores is not None:
            self._scores.start(model)

    def got_tokens(self) -> None:
        """New tokens of its completions are there."""
        now, first = time.monotonic(), self._metrics.first_token_time
        first = now if first is None else first
        self._metrics = dataclasses.replace(self._metrics, first_token_time=first, last_token_time=now)

    def output(self) -> RequestOutput:
        """All of it; or, of a request that is streamed, what came since the last call."""
        if self.request.is_streamed:
            outputs = [delta for one in self.completions if (delta := one.delta()) is not None]
        else:
            outputs = [one.output() for one in self.completions]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            prompt_logprobs=None if self._scores is None else self._scores.entries(),
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics,
        )

    @property
    def _num_cached_tokens(self) -> int | None:
        known = (one.num_cached_tokens for one in self.completions if one.num_cached_tokens is not None)
        return next(known, None)


class Answers:
    """Requests that are being answered, by name, and what is to be given out."""

    def __init__(self, limits: Limits):
        """None yet."""
        self._limits = limits
        self._seeds = derived_seeds(limits.config.seed)
        self.clear()

    def clear(self) -> None:
        """Drops all of them; seeds go on."""
        self._open: dict[str, Answer] = {}
        self._outputs: list[RequestOutput] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether some are being answered, or something has not been taken yet."""
        return bool(self._open or self._outputs)

    def __getitem__(self, request_id: str) -> Answer:
        """The one of this name."""
        return self._open[request_id]

    def get(self, request_id: str) -> Answer | None:
        """The one of this name; None where there is none."""
        return self._open.get(request_id)

    def begin(self, request: Request) -> Answer:
        """A new one.

        Raises:
          ValueError: one of that name is being answered.
        """
        if request.request_id in self._open:
            raise ValueError(f"request_id must be new, got {request.request_id!r}, which is being answered.")
        seed = next(self._seeds) if request.params.seed is None else request.params.seed
        rows = [request.row_params(index, seed, self._limits.vocab_size) for index in range(request.params.n)]
        answer = Answer(request, rows, self._limits)
        self._open[request.request_id] = answer
        return answer

    def give_out(self, answer: Answer) -> None:
        """Puts out a request that ended, or the new tokens of one that is streamed."""
        request, is_finished = answer.request, answer.is_finished
        if is_finished:
            del self._open[request.request_id]
        if is_finished or request.is_streamed:
            self._outputs.append(answer.output())

    def take_outputs(self) -> list[RequestOutput]:
        """What was put out since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs
