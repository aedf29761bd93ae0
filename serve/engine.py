"""An engine: requests in, tokens out as they come. Rows that end make room for requests that wait.

Knows nothing of HTTP and has no thread: one caller owns it and turns it with `step`. The device is one chunk of steps
ahead of what the host reads, and ends a chunk early where rows have ended and others wait for them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import jax

from jaxmask import SamplingParams
from jaxmask.rollout import Finish
from serve.completions import Answer, Completion, eos_token_ids
from serve.config import EngineConfig, default_params, derived_seeds, most_tokens
from serve.outputs import RequestOutput
from serve.programs import ScoringModel
from serve.report import Reading
from serve.requests import Limits, Request, TokenIds
from serve.slots import Chunk, Slots
from serve.stats import Counters


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
          ValueError: max_model_len beyond what the model can read.
        """
        self.config = EngineConfig() if config is None else config
        most = most_tokens(model, self.config)
        can_score = isinstance(model, ScoringModel)
        self.limits = Limits(self.config, vocab_size or model.vocab_size, most, tokenizer, can_score)
        self.default_params = default_params(generation_defaults or {})
        self.counters = Counters()
        self._model = model
        self._slots = Slots(model, self.config, self.limits.vocab_size, eos_token_ids(tokenizer))
        self._waiting: collections.deque[Completion] = collections.deque()
        self._unseen: list[Completion] = []
        self._chunks: collections.deque[Chunk] = collections.deque()
        self._answers: dict[str, Answer] = {}
        self._outputs: list[RequestOutput] = []
        self._seeds = derived_seeds(self.config.seed)

    @property
    def num_running(self) -> int:
        """Completions that have a slot."""
        return len(self._slots.owners) - self._slots.num_free

    @property
    def num_waiting(self) -> int:
        """Completions that wait for one."""
        return len(self._waiting)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._answers or self._outputs)

    def check(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | None = None,
        *,
        is_streamed: bool = False,
        text: str | None = None,
    ) -> Request:
        """A request that can be answered; raises ValueError where it cannot. See `Request.of`."""
        params = self.default_params if params is None else params
        return Request.of(request_id, prompt, params, self.limits, is_streamed=is_streamed, text=text)

    def submit(self, request: Request) -> None:
        """Takes a request, to be answered by `step`.

        Raises:
          ValueError: one of that name is being answered.
        """
        if request.request_id in self._answers:
            raise ValueError(f"request_id must be new, got {request.request_id!r}, which is being answered.")
        seed = next(self._seeds) if request.params.seed is None else request.params.seed
        vocab_size = self.limits.vocab_size
        rows = (request.row_params(index, seed, vocab_size) for index in range(request.params.n))
        answer = Answer(request, list(rows), self.limits)
        self._answers[request.request_id] = answer
        self._waiting.extend(answer.completions)
        self._unseen.extend(answer.completions)
        self.counters.num_prompt_tokens += len(request.prompt_token_ids)

    def add_request(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | None = None,
        *,
        is_streamed: bool = False,
    ) -> None:
        """`check` and `submit`."""
        self.submit(self.check(request_id, prompt, params, is_streamed=is_streamed))

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests; the next `step` gives out what was read of them. Names of others are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            answer = self._answers.get(request_id)
            for completion in () if answer is None else answer.completions:
                if completion.finish_reason is None:
                    completion.abort()
                    self._slots.release(completion, is_cut=True)
            if answer is not None:
                self._give_out(answer)
        self._waiting = collections.deque(one for one in self._waiting if one.finish_reason is None)

    def reset(self) -> None:
        """Drops all requests, and what is on the device: after an error, which may have left that in pieces."""
        self._slots.clear()
        for pending in (self._waiting, self._unseen, self._chunks, self._answers, self._outputs):
            pending.clear()

    def update_weights(self, model: Any) -> None:
        """Goes on with another model from the next chunk on; what was read of running completions stays in the cache.

        Raises:
          ValueError: it has other shapes or types, for which all would be compiled anew.
        """
        if _shapes(model) != _shapes(self._model):
            raise ValueError("the new model must have the shapes and types of the one before")
        self._model = model

    def step(self) -> list[RequestOutput]:
        """What came since the last call: requests that ended, and new tokens of those that are streamed.

        Asks the device for further steps before it waits for those before.
        """
        self._admit()
        if not self._slots.is_idle:
            self._chunks.append(self._slots.decode(self._model, *self._pace()))
        if len(self._chunks) > 1:
            self._read(self._chunks.popleft())
        if self._slots.is_idle:
            # Nothing in flight belongs to anyone.
            self._chunks.clear()
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        """What is there to give out, without a further step: that of requests that were aborted."""
        outputs, self._outputs = self._outputs, []
        return outputs

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
        num_rows = min(self.num_running + len(self._waiting), self.config.max_num_seqs)
        was_idle = self._slots.is_idle
        self._fit(num_rows, self._waiting if was_idle else ())
        arriving = [self._waiting.popleft() for _ in range(min(self._slots.num_free, len(self._waiting)))]
        if not arriving:
            return
        if not was_idle:
            self._fit(num_rows, arriving)
        placed = self._slots.place(arriving)
        if self._slots.must_remember():
            while self._chunks:
                self._read(self._chunks.popleft())
            self._slots.remember()
        self._slots.admit(self._model, placed)
        for completion in arriving:
            self._answers[completion.request.request_id].begin(self._model)

    def _fit(self, num_rows: int, completions: Iterable[Completion]) -> None:
        num_tokens = max((one.request.num_tokens for one in completions), default=1)
        self._slots.fit(self._model, num_rows, num_tokens, self.limits.max_model_len)

    def _read(self, chunk: Chunk) -> None:
        """What a chunk drew, to the completions that had its rows and go on."""
        reading, changed = Reading(chunk.report), {}
        for slot, completion in enumerate(chunk.owners):
            finish = Finish(int(reading.finish[slot]))
            count = int(reading.counts[slot])
            if completion is None or completion.finish_reason is not None or (count, finish) == (0, Finish.RUNNING):
                continue
            request = completion.request
            completion.take(
                reading.token_ids[slot, :count].tolist(),
                finish,
                reading.mask(slot) if request.returns_mask else None,
                reading.logprobs(slot) if request.params.logprobs is not None else None,
            )
            if completion.finish_reason is not None:
                self._slots.release(completion, is_cut=finish == Finish.RUNNING)
            changed[request.request_id] = self._answers[request.request_id]
        for answer in changed.values():
            self._give_out(answer)
        self._slots.num_ids = reading.num_ids
        self._count(reading, len(chunk.owners))

    def _give_out(self, answer: Answer) -> None:
        """Puts out a request that ended, or the new tokens of one that is streamed."""
        request, is_finished = answer.request, answer.is_finished
        if is_finished:
            del self._answers[request.request_id]
        if is_finished or request.is_streamed:
            self._outputs.append(answer.output())

    def _count(self, reading: Reading, num_slots: int) -> None:
        counters = self.counters
        counters.num_tokens += int(reading.counts.sum())
        counters.num_steps += reading.num_steps
        counters.num_slot_steps += reading.num_steps * num_slots
        counters.num_busy_slot_steps += reading.num_busy
        counters.num_bytes += reading.num_bytes


def _shapes(model: Any) -> list[Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return [(path, leaf.shape, leaf.dtype) for path, leaf in leaves]
