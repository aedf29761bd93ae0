"""An engine: requests in, tokens out as they come. Rows that end make room for requests that wait.

Knows nothing of HTTP and has no thread: one caller owns it and turns it with `step`. The device is one chunk of steps
ahead of what the host reads, and ends a chunk early where rows have ended and others wait for them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from jaxmask import SamplingParams
from serve.answers import Answer, Answers
from serve.completions import Completion, eos_token_ids
from serve.config import EngineConfig, default_params, most_tokens
from serve.delivery import deliver
from serve.outputs import RequestOutput
from serve.programs import ScoringModel
from serve.reading import PromptReader
from serve.report import Reading
from serve.requests import Limits, Request, TokenIds
from serve.slots import Chunk, Slots
from serve.stats import Counters
from serve.waiting import Waiting
from serve.weights import Weights


class Engine:
    """Answers requests with a model.

    Attributes:
      config: its settings.
      limits: what it can answer.
      counters: what it has done.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        vocab_size: int | None = None,
        generation_defaults: dict[str, Any] | None = None,
    ):
        """An engine without requests; nothing is compiled yet.

        Args:
          model: a `models.Decoder`, or another `Model` whose caches take rows of others.
          tokenizer: its tokenizer; None where it has none.
          config: settings; None: those of `EngineConfig()`.
          vocab_size: ids of the model; None: as the model says.
          generation_defaults: content of a generation_config.json, for requests that bring no settings.

        Raises:
          ValueError: max_model_len beyond what the model can read, or prefix caching for a model that has no `extend`.
        """
        self.config = EngineConfig() if config is None else config
        most = most_tokens(model, self.config)
        size = vocab_size or model.vocab_size
        self.limits = Limits(self.config, size, most, tokenizer, isinstance(model, ScoringModel))
        self.default_params = default_params(generation_defaults or {})
        self.counters = Counters()
        self._weights = Weights(model)
        self._slots = Slots(model, self.config, self.limits.vocab_size, eos_token_ids(tokenizer))
        self._reader = PromptReader(model, self.config, self._slots, self.counters)
        self._waiting = Waiting(self.config.max_num_seqs)
        self._unseen: list[Completion] = []
        self._chunks: collections.deque[Chunk] = collections.deque()
        self._answers = Answers(self.limits)

    @property
    def num_running(self) -> int:
        """Completions that have a slot."""
        return len(self._slots.owners) - self._slots.num_free

    @property
    def num_waiting(self) -> int:
        """Completions that wait for one."""
        return len(self._waiting)

    @property
    def capacity_share(self) -> float:
        """Of the tokens that the slots have room for, those that are there; in [0, 1]."""
        return self._slots.used_share

    @property
    def model(self) -> Any:
        """The model that answers."""
        return self._weights.model

    @property
    def weight_version(self) -> str:
        """The name of its weights; "0" at first."""
        return self._weights.version

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to do."""
        return self._answers.has_unfinished

    def check(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | None = None,
        *,
        is_streamed: bool = False,
        text: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """A request that can be answered; raises ValueError where it cannot. See `Request.of`."""
        params = self.default_params if params is None else params
        return Request.of(
            request_id, prompt, params, self.limits, is_streamed=is_streamed, text=text, cache_salt=cache_salt
        )

    def submit(self, request: Request) -> None:
        """Takes a request, to be answered by `step`.

        Raises:
          ValueError: one of that name is being answered.
        """
        answer = self._answers.begin(request)
        self._waiting.add(answer.completions)
        self._unseen.extend(answer.completions)
        self.counters.num_prompt_tokens += len(request.prompt_token_ids)

    def add_request(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | None = None,
        *,
        is_streamed: bool = False,
        cache_salt: str | None = None,
    ) -> None:
        """`check` and `submit`."""
        self.submit(self.check(request_id, prompt, params, is_streamed=is_streamed, cache_salt=cache_salt))

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests; the next `step` gives out what was read of them. Names of others are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            answer = self._answers.get(request_id)
            if answer is not None:
                self._waiting.drop(request_id)
                for completion in answer.completions:
                    if completion.finish_reason is None:
                        completion.abort()
                        self._release(completion, is_cut=True)
                self._answers.give_out(answer)

    def reset(self) -> None:
        """Drops all requests, and what is on the device: after an error, which may have left that in pieces."""
        for pending in (self._slots, self._reader, self._waiting, self._answers, self._unseen, self._chunks):
            pending.clear()

    def release(self) -> None:
        """Drops all that is on the device but the weights and a row of settings; ValueError while requests run."""
        if self.has_unfinished_requests():
            raise ValueError("requests are being answered: let them finish, or abort them")
        self.reset()

    def reset_prefix_cache(self) -> bool:
        """Forgets what is kept of prompts. True, as in vLLM: nothing hinders it, not even requests that run."""
        self._reader.forget()
        return True

    def update_weights(self, model: Any, weight_version: str | None = None) -> None:
        """Goes on with another model from the next chunk on: with what was read of prompts that run, and of no others.

        Args:
          model: of the shapes and types of the one before.
          weight_version: the name of its weights; None: the number after the one before, or the name before and "+1".

        Raises:
          ValueError: it has other shapes or types, for which all would be compiled anew.
        """
        self._weights.replace(model, weight_version)
        self._reader.forget()

    def step(self) -> list[RequestOutput]:
        """What came since the last call: requests that ended, and new tokens of those that are streamed.

        Asks the device for further steps before it waits for those before.
        """
        self._admit()
        self._reader.advance(self._weights.model)
        if self._slots.is_decoding:
            self._chunks.append(self._slots.decode(self._weights.model, *self._pace(), self._weights.version))
        if len(self._chunks) > 1:
            self._read(self._chunks.popleft())
        if not self._slots.is_decoding:
            # Nothing in flight belongs to anyone.
            self._chunks.clear()
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        """What is there to give out, without a further step: that of requests that were aborted."""
        return self._answers.take_outputs()

    def _pace(self) -> tuple[int, int]:
        """Most steps of the next chunk, and rows that may lie idle in it."""
        owners = self._slots.owners
        is_watched = any(owner.needs_host for owner in owners if owner is not None)
        num_steps = self.config.stream_interval if is_watched else self.config.steps_per_chunk
        # A sixteenth of the rows: so much may lie idle before others are let in.
        return min(num_steps, self.config.steps_per_chunk), len(owners) // 16 if self._waiting else len(owners)

    def _admit(self) -> None:
        self._slots.expect(self._unseen)
        self._unseen.clear()
        if not self._waiting:
            return
        num_running, longest = self.num_running, self._waiting.most_tokens
        arriving = self._waiting.take(self.config.max_num_seqs - num_running)
        if not arriving:
            return
        # Shapes cannot shrink while something runs, but need not grow for those that come later.
        num_tokens = max(one.request.num_tokens for one in arriving) if num_running else longest
        self._slots.fit(self._weights.model, num_running + len(arriving), num_tokens, self.limits.max_model_len)
        placed = self._slots.place(arriving)
        if self._slots.must_remember():
            while self._chunks:
                self._read(self._chunks.popleft())
            self._slots.remember()
        self._reader.admit(self._weights.model, placed)
        for completion in arriving:
            self._answers[completion.request.request_id].scheduled(self._weights.model)

    def _release(self, completion: Completion, *, is_cut: bool) -> None:
        """Takes the slot of a completion that has ended, where it has one; `is_cut` as in `Slots.release`."""
        self._reader.drop(completion)
        self._slots.release(completion, is_cut=is_cut)
        self._waiting.ended(completion)

    def _read(self, chunk: Chunk) -> None:
        """What a chunk drew, to the completions that had its rows and go on."""
        reading = Reading(chunk.report)
        changed: dict[str, Answer] = {}
        for completion, is_cut in deliver(reading, chunk):
            changed[completion.request.request_id] = self._answers[completion.request.request_id]
            if completion.finish_reason is not None:
                self._release(completion, is_cut=is_cut)
        for answer in changed.values():
            answer.got_tokens()
            self._answers.give_out(answer)
        self._slots.num_ids = reading.num_ids
        self.counters.count(reading, len(chunk.owners))
