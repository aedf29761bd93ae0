"""The rows of the device, and which completion has each of them.

Shapes only grow while completions run; slots without any are made anew as small as the next ones need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmask import SamplingParams
from jaxmask.batch import SamplingBatch
from jaxmask.decoding import Decoding, StepOptions
from jaxmask.kernels.dispatch import settle
from jaxmask.model import PlacedModel
from serve import programs
from serve.arrivals import arrivals_of, looks_back_at, rectangle, sizes_of
from serve.completions import Completion
from serve.config import MAX_WIDTH, EngineConfig, bucket
from serve.report import Report

MIN_PROMPT_WIDTH = 16
MIN_WIDTH, MIN_WIDTH_UNBOUNDED = 8, 64
_IDLE = SamplingParams(max_tokens=1, seed=0, return_sampling_mask=False)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Steps that the device was asked to take.

    Attributes:
      report: what they will have drawn.
      owners: whose each row was.
    """

    report: Report
    owners: tuple[Completion | None, ...]


class Slots:
    """Decoding rows; see `programs` for what runs on them.

    Attributes:
      owners: the completion in each slot; None where there is none.
      capacity: tokens that a slot has room for.
      num_ids: ids of supports that a chunk is expected to hold: so many are fetched before they are asked for.
    """

    def __init__(self, model: Any, config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int]):
        """No slots.

        Args:
          model: see `Model`; its caches take rows of others.
          config: the engine's settings.
          vocab_size: ids of the model.
          eos_token_ids: ids that end a completion.
        """
        self._config, self._vocab_size, self._eos = config, vocab_size, tuple(eos_token_ids)
        self.clear()
        leaf = jax.tree.leaves(model)[0]
        self._is_on_cpu = next(iter(leaf.devices())).platform == "cpu"
        self._widest = MIN_WIDTH_UNBOUNDED if config.unbounded_support else MIN_WIDTH
        self._options = StepOptions(
            width=min(self._widest, vocab_size),
            logprobs_mode=config.logprobs_mode,
            sharding=model.logits_sharding if isinstance(model, PlacedModel) else None,
            implementation=settle("auto", leaf),
        )
        # The sizes of all settings so far. Its one row returns no support, so that this setting is always there.
        self._seen: set[tuple[int, ...]] = set()
        self._largest: SamplingBatch | None = None
        self._largest = self._batch = self._settings_of([_IDLE])

    def clear(self) -> None:
        """Back to no slots; the sizes of settings stay as they have grown."""
        self.owners: list[Completion | None] = []
        self.capacity = self.num_ids = 0
        self._state: Decoding | None = None
        self._remembered: tuple[bool, bool, int] | None = None
        self._rows: list[SamplingParams] = []
        self._is_cut: list[bool] = []

    @property
    def num_free(self) -> int:
        """Slots without a completion."""
        return self.owners.count(None)

    @property
    def is_idle(self) -> bool:
        """Whether no slot has a completion."""
        return all(owner is None for owner in self.owners)

    def expect(self, completions: Sequence[Completion]) -> None:
        """Settings that will come, so that no shape has to grow for them later."""
        for completion in completions:
            self._widen(completion)
            sizes = sizes_of(completion.row_params)
            if sizes not in self._seen:
                self._seen.add(sizes)
                self._largest = self._settings_of([completion.row_params])

    def fit(self, model: Any, num_rows: int, num_tokens: int, max_model_len: int) -> None:
        """Makes room for so many completions of so many tokens each, prompts included; those that run stay."""
        config = self._config
        num_rows = bucket(max(num_rows, config.min_num_seqs), config.max_num_seqs)
        capacity = bucket(max(num_tokens, config.min_model_len), max_model_len)
        if not self.is_idle:
            num_rows, capacity = max(num_rows, len(self.owners)), max(capacity, self.capacity)
        if (num_rows, capacity) == (len(self.owners), self.capacity):
            return
        before, was_idle = self._state, self.is_idle
        missing = num_rows - len(self.owners)
        self.owners = [None] * num_rows if was_idle else self.owners + [None] * missing
        self._rows = [_IDLE] * num_rows if was_idle else self._rows + [_IDLE] * missing
        self._is_cut = [False] * num_rows if was_idle else self._is_cut + [False] * missing
        self.capacity = capacity
        self._make_batch()
        # The smaller ones go before the larger ones come.
        before, self._state = (None, None) if was_idle else (before, None)
        self._state = programs.empty_slots(model, self._batch, config.speculation, capacity=capacity)
        looks_back = looks_back_at(self._batch)
        is_known = was_idle or looks_back == self._remembered
        if before is not None:
            before = before if is_known else dataclasses.replace(before, history=None)
            self._state = programs.move(self._state, before)
        self._remembered = looks_back if is_known else None

    def place(self, completions: Sequence[Completion]) -> dict[int, Completion]:
        """Gives each completion a free slot, by which it is returned; `admit` begins them."""
        free = [slot for slot, owner in enumerate(self.owners) if owner is None]
        placed = dict(zip(free, completions, strict=False))
        for slot, completion in placed.items():
            self.owners[slot], self._rows[slot], self._is_cut[slot] = completion, completion.row_params, False
        self._make_batch()
        return placed

    def must_remember(self) -> bool:
        """Whether the settings look back at more than the slots remember; `remember` then comes before `admit`."""
        return looks_back_at(self._batch) != self._remembered

    def remember(self) -> None:
        """Makes the history of all slots anew; every token that was drawn must have been read."""
        prompts = [() if owner is None else owner.request.prompt_token_ids for owner in self.owners]
        outputs = [() if owner is None else owner.token_ids for owner in self.owners]
        lengths = jnp.asarray(np.array([len(prompt) for prompt in prompts], np.int32))
        prompt_ids, token_ids = (rectangle(rows, len(rows), self.capacity) for rows in (prompts, outputs))
        self._state = programs.remember(self._batch, self._state, prompt_ids, lengths, token_ids)
        self._remembered = looks_back_at(self._batch)

    def admit(self, model: Any, placed: dict[int, Completion]) -> None:
        """Reads the prompts of completions, and begins these; a prompt that several of them continue is read once."""
        by_shape: dict[tuple[int, int | None], dict[int, Completion]] = {}
        for slot, completion in placed.items():
            shape = self._prompt_shape(len(completion.request.prompt_token_ids))
            by_shape.setdefault(shape, {})[slot] = completion
        for (width, chunk_size), some in by_shape.items():
            tokens = self._config.prefill_tokens or (32 if self._is_on_cpu else 4096)
            group_size = min(max(tokens // (chunk_size or width), 1), len(self.owners))
            self._state = programs.admit(
                model,
                self._batch,
                self._state,
                self._config.speculation,
                arrivals_of(some, len(self.owners), group_size, width),
                group_size=group_size,
                capacity=self.capacity,
                chunk_size=chunk_size,
            )

    def decode(self, model: Any, num_steps: int, max_idle: int) -> Chunk:
        """Asks for some steps; ends where more than `max_idle` rows have ended."""
        pace = programs.Pace(jnp.int32(num_steps), jnp.int32(max_idle), jnp.asarray(np.array(self._is_cut)))
        speculation = self._config.speculation
        per_step = 1 if speculation is None else speculation.num_tokens + 1
        self._state, report = programs.decode(
            model,
            self._batch,
            self._state,
            speculation,
            pace,
            num_columns=self._config.steps_per_chunk * per_step,
            options=self._options,
        )
        self._is_cut = [False] * len(self.owners)
        requests = [owner.request for owner in self.owners if owner is not None]
        with_masks = any(request.returns_mask for request in requests)
        with_logprobs = any(request.params.logprobs is not None for request in requests)
        report.prefetch(max(self.num_ids, 1) if with_masks else 0, with_logprobs=with_logprobs)
        return Chunk(report, tuple(self.owners))

    def release(self, completion: Completion, *, is_cut: bool) -> None:
        """Frees the slot of a completion; `is_cut` where the device does not know yet that it has ended."""
        if completion in self.owners:
            slot = self.owners.index(completion)
            self.owners[slot], self._is_cut[slot] = None, is_cut

    def _widen(self, completion: Completion) -> None:
        request, asked = completion.request, completion.request.params.logprobs
        if request.returns_mask and request.params.top_k > 0:
            self._widest = max(self._widest, completion.row_params.top_k)
        num_logprobs = self._options.num_logprobs
        if asked is not None:
            most = self._vocab_size if asked == -1 else asked
            num_logprobs = max(num_logprobs or 0, bucket(most, self._vocab_size) if most else 0)
        width = min(bucket(self._widest, MAX_WIDTH), self._vocab_size)
        self._options = dataclasses.replace(self._options, width=width, num_logprobs=num_logprobs)

    def _make_batch(self) -> None:
        self._batch = self._settings_of(self._rows)

    def _settings_of(self, rows: Sequence[SamplingParams]) -> SamplingBatch:
        is_bounded = not self._config.unbounded_support and self._widest <= MAX_WIDTH
        return SamplingBatch.from_params(
            rows,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos,
            support_bound=self._options.width if is_bounded else None,
            like=self._largest,
        )

    def _prompt_shape(self, num_tokens: int) -> tuple[int, int | None]:
        """Columns for prompts of so many tokens, and how many of them are read at once where that is not all."""
        chunk_size = self._config.prefill_chunk_size
        if num_tokens > chunk_size:
            # As many pieces as there are tokens: one width serves all.
            return self.capacity, chunk_size
        return bucket(max(num_tokens, MIN_PROMPT_WIDTH), self.capacity), None
