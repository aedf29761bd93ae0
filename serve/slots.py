"""The rows of the device, and which completion has each of them.

Shapes only grow while completions run; slots without any are made anew as small as the next ones need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmask import SamplingParams
from jaxmask.decoding import Decoding
from jaxmask.rollout import Finish
from serve import programs, row_programs
from serve.arrivals import arrivals_of, looks_back_at, prompt_shape, rectangle
from serve.completions import Completion
from serve.config import EngineConfig, bucket
from serve.report import Report
from serve.requests import Request
from serve.row_settings import IDLE, RowSettings


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Steps that the device was asked to take.

    Attributes:
      report: what they will have drawn.
      owners: whose each row was; None where none was under way.
      weight_version: of the model that took them.
    """

    report: Report
    owners: tuple[Completion | None, ...]
    weight_version: str


class Slots:
    """Decoding rows; see `programs` for what runs on them.

    Attributes:
      owners: the completion in each slot; None where there is none.
      unread: slots whose completions have not begun, because their prompts are still being read.
      capacity: tokens that a slot has room for.
      prefill_tokens: of short prompts that are read at once.
      tokens_at_once: of one row, read by one pass of the model.
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
        self._config, self._settings = config, RowSettings(model, config, vocab_size, eos_token_ids)
        self.clear()
        is_on_cpu = next(iter(jax.tree.leaves(model)[0].devices())).platform == "cpu"
        self.prefill_tokens = config.prefill_tokens or (32 if is_on_cpu else 4096)
        # So many take little more time for each than a whole prompt does.
        self.tokens_at_once = min(128 if is_on_cpu else 512, config.prefill_chunk_size)

    def clear(self) -> None:
        """Back to no slots; the sizes of settings stay as they have grown."""
        self.owners: list[Completion | None] = []
        self.unread: set[int] = set()
        self.capacity = self.num_ids = 0
        self._state: Decoding | None = None
        self._remembered: tuple[bool, bool, int] | None = None
        self._rows: list[SamplingParams] = []
        self._is_cut: list[bool] = []
        self._batch = self._settings.batch_of([IDLE])

    @property
    def num_free(self) -> int:
        """Slots without a completion."""
        return self.owners.count(None)

    @property
    def is_idle(self) -> bool:
        """Whether no slot has a completion."""
        return all(owner is None for owner in self.owners)

    @property
    def is_decoding(self) -> bool:
        """Whether some slot has a completion that has begun."""
        return any(owner is not None and slot not in self.unread for slot, owner in enumerate(self.owners))

    @property
    def used_share(self) -> float:
        """Of the tokens that all slots have room for, those that are there; in [0, 1]. Other threads may ask."""
        slots, capacity = self.owners, self.capacity
        used = sum(len(one.request.prompt_token_ids) + len(one.token_ids) for one in slots if one is not None)
        return used / max(len(slots) * capacity, used, 1)

    @property
    def keeps_all(self) -> bool:
        """Whether slots hold every token that they read; there must be some."""
        return self._state is not None and self._state.cache.keeps_all

    def expect(self, completions: Sequence[Completion]) -> None:
        """See `RowSettings.expect`."""
        self._settings.expect(completions)

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
        self._rows = [IDLE] * num_rows if was_idle else self._rows + [IDLE] * missing
        self._is_cut = [False] * num_rows if was_idle else self._is_cut + [False] * missing
        self.capacity = capacity
        self._batch = self._settings.batch_of(self._rows)
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
            self.owners[slot], self._rows[slot] = completion, completion.row_params
        self._batch = self._settings.batch_of(self._rows)
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
        self._begin(placed)
        by_shape: dict[tuple[int, int | None], dict[int, Completion]] = {}
        for slot, completion in placed.items():
            length = len(completion.request.prompt_token_ids)
            shape = prompt_shape(length, self._config.prefill_chunk_size, self.capacity)
            by_shape.setdefault(shape, {})[slot] = completion
        for (width, chunk_size), some in by_shape.items():
            group_size = min(max(self.prefill_tokens // (chunk_size or width), 1), len(self.owners))
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

    def put_row(self, row: Any, num_read: int, request: Request, slots: Sequence[int], *, begins: bool = True) -> None:
        """A prompt of which a row has read so many of the first tokens, in some slots.

        Args:
          row: see `row_programs.RowCache`; its room is not more than the slots'.
          num_read: tokens of the prompt that the row holds.
          request: whose prompt it is.
          slots: at least one.
          begins: all but the last of the prompt's tokens are read: the completions in these slots go on from there.
        """
        length = len(request.prompt_token_ids)
        finish = Finish.RUNNING if begins else Finish.STOP
        places = [*slots, *[0] * (len(self.owners) - len(slots))]
        self._state = row_programs.put_row(
            self._batch,
            self._state,
            row,
            rectangle([request.prompt_token_ids], 1, self.capacity),
            jnp.asarray(np.array([length, num_read, len(slots), finish], np.int32)),
            jnp.asarray(np.array(places, np.int32)),
            capacity=self.capacity,
        )
        if begins:
            self._begin(slots)

    def take_row(self, slot: int, num_tokens: int, width: int, chunk_size: int) -> Any:
        """What a slot has read of its first tokens, with room for `width`, to be read on by `chunk_size` at once."""
        assert self._state is not None
        place, count = jnp.int32(slot), jnp.int32(num_tokens)
        return row_programs.take_row(self._state.cache, place, count, capacity=width, chunk_size=chunk_size)

    def decode(self, model: Any, num_steps: int, max_idle: int, weight_version: str) -> Chunk:
        """Asks for some steps; ends where more than `max_idle` rows of those that had begun have ended."""
        max_idle += len(self.unread)
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
            options=self._settings.options,
        )
        self._is_cut = [False] * len(self.owners)
        owners = tuple(None if slot in self.unread else owner for slot, owner in enumerate(self.owners))
        requests = [owner.request for owner in owners if owner is not None]
        with_masks = any(request.returns_mask for request in requests)
        with_logprobs = any(request.params.logprobs is not None for request in requests)
        report.prefetch(max(self.num_ids, 1) if with_masks else 0, with_logprobs=with_logprobs)
        return Chunk(report, owners, weight_version)

    def release(self, completion: Completion, *, is_cut: bool) -> None:
        """Frees the slot of a completion; `is_cut` where the device does not know yet that it has ended."""
        if completion in self.owners:
            slot = self.owners.index(completion)
            self.owners[slot], self._is_cut[slot] = None, is_cut
            self.unread.discard(slot)

    def _begin(self, slots: Iterable[int]) -> None:
        """Completions in these slots are under way."""
        for slot in slots:
            self._is_cut[slot] = False
            self.unread.discard(slot)
