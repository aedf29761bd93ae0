"""How prompts get into slots: at once, from what was read before, or bit by bit while others go on.

A short prompt that is new is read at once. One that begins like a prompt that was read before gets the keys and values
of that beginning, and only the rest is read; a long one is read a piece between two chunks of steps. Both are read in a
cache of one row, which goes into the prompt's slots when it is done. Equal prompts that come meanwhile wait for it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from serve import row_programs
from serve.arrivals import prompt_shape, rectangle
from serve.completions import Completion
from serve.config import EngineConfig
from serve.prefix_cache import Entry, PrefixCache
from serve.requests import Request
from serve.slots import Slots
from serve.stats import Counters

# Rows have room for powers of four of it, so that few programs are compiled.
_MIN_ROW_WIDTH = 64


@dataclasses.dataclass(eq=False)
class _Reading:
    """A prompt under way to its slots.

    `is_kept` is false once the model has changed: what is read belongs to no other request.
    """

    request: Request
    slots: list[int]
    row: Any
    width: int
    num_read: int
    num_cached: int
    is_kept: bool = True

    @property
    def num_left(self) -> int:
        return len(self.request.prompt_token_ids) - 1 - self.num_read


class PromptReader:
    """Reads prompts into slots."""

    def __init__(self, model: Any, config: EngineConfig, slots: Slots, counters: Counters):
        """With nothing to read.

        Raises:
          ValueError: prefixes are to be kept of a model that cannot read on.
        """
        self._reads_on = isinstance(model, row_programs.ExtendingModel) and config.speculation is None
        if config.enable_prefix_caching and not self._reads_on:
            raise ValueError("enable_prefix_caching needs a model that reads on after a beginning (`extend`).")
        self._config, self._slots, self._counters = config, slots, counters
        self._kept = PrefixCache(config.prefix_cache_tokens) if config.enable_prefix_caching else None
        self._readings: collections.deque[_Reading] = collections.deque()

    def clear(self) -> None:
        """Drops what is being read, and what was kept."""
        self._readings.clear()
        self.forget()

    def forget(self) -> None:
        """Drops what was kept; what is being read will not be."""
        for reading in self._readings:
            reading.is_kept = False
        if self._kept is not None:
            self._kept.clear()

    def admit(self, model: Any, placed: dict[int, Completion]) -> None:
        """Begins completions that have been given slots, or begins to read their prompts."""
        groups: dict[tuple[str | None, tuple[int, ...]], dict[int, Completion]] = {}
        for slot, completion in placed.items():
            groups.setdefault(completion.request.prompt_key, {})[slot] = completion
        together: dict[int, Completion] = {}
        num_cells = 0
        for group in groups.values():
            if self._reads_on and self._begin(model, group):
                continue
            together |= group
            num_cells += self._num_cells(len(next(iter(group.values())).request.prompt_token_ids))
            if self._kept is not None and num_cells >= self._slots.prefill_tokens:
                # No more are read at once anyway, and those that follow may begin like these.
                self._read_together(model, together)
                together, num_cells = {}, 0
        self._read_together(model, together)

    def advance(self, model: Any) -> None:
        """Reads on in long prompts, as much as goes between two chunks of steps."""
        num_left = max(self._config.prefill_chunk_size, self._slots.prefill_tokens)
        while self._readings and num_left > 0:
            reading = self._readings[0]
            if not self._slots.is_decoding:
                # There is no chunk to wait for: the host does not run ahead of the device.
                jax.block_until_ready(reading.row)
            num_left -= self._read_some(model, reading)
            if not reading.num_left:
                self._readings.popleft()
                self._finish(reading)

    def drop(self, completion: Completion) -> None:
        """Leaves out a completion that has ended; a prompt that nobody waits for any more is not read on."""
        if completion not in self._slots.owners:
            return
        slot = self._slots.owners.index(completion)
        for reading in [one for one in self._readings if slot in one.slots]:
            reading.slots.remove(slot)
            if not reading.slots:
                self._readings.remove(reading)

    def _begin(self, model: Any, group: dict[int, Completion]) -> bool:
        """Whether the prompt of these completions is read here: it is long, or its beginning is known."""
        request, slots = next(iter(group.values())).request, list(group)
        same = next(
            (one for one in self._readings if one.is_kept and one.request.prompt_key == request.prompt_key), None
        )
        if same is not None:
            same.slots += slots
            self._slots.unread.update(slots)
            self._note_cached(group.values(), same.num_cached)
            return True
        num_tokens = len(request.prompt_token_ids) - 1
        entry, num_cached = self._find(request)
        self._note_cached(group.values(), num_cached)
        if entry is not None and num_cached == num_tokens:
            self._slots.put_row(entry.row, num_cached, request, slots)
            return True
        if entry is None and num_tokens < self._config.prefill_chunk_size:
            return False
        if entry is not None:
            self._slots.put_row(entry.row, num_cached, request, slots[:1], begins=False)
        row, width = self._take(slots[0], num_cached, num_tokens)
        reading = _Reading(request, slots, row, width, num_cached, num_cached)
        if reading.num_left <= self._config.prefill_chunk_size:
            self._read_some(model, reading)
            self._finish(reading)
        else:
            self._slots.unread.update(slots)
            self._readings.append(reading)
        return True

    def _find(self, request: Request) -> tuple[Entry | None, int]:
        if self._kept is None:
            return None, 0
        salt, token_ids = request.prompt_key
        entry, num_cached = self._kept.find(salt, token_ids[:-1], self._slots.capacity) or (None, 0)
        if not self._saves(len(token_ids), num_cached):
            entry, num_cached = None, 0
        self._counters.num_prefix_queries += len(token_ids)
        self._counters.num_prefix_hits += num_cached
        return entry, num_cached

    def _note_cached(self, completions: Iterable[Completion], num_cached: int) -> None:
        for completion in completions if self._kept is not None else ():
            completion.num_cached_tokens = num_cached

    def _saves(self, length: int, num_cached: int) -> bool:
        """Whether a prompt has fewer cells to be read after a beginning than without it, padding included."""
        whole = self._num_cells(length)
        if length > self._config.prefill_chunk_size:
            whole = self._padded(length - 1)
        return self._padded(length - 1 - num_cached) < whole

    def _padded(self, num_tokens: int) -> int:
        """Cells of a row in which so many tokens are read."""
        return -(-num_tokens // self._slots.tokens_at_once) * self._slots.tokens_at_once

    def _num_cells(self, length: int) -> int:
        """Cells of a prompt that are read at once where it is read alone."""
        width, chunk_size = prompt_shape(length, self._config.prefill_chunk_size, self._slots.capacity)
        return chunk_size or width

    def _read_together(self, model: Any, placed: dict[int, Completion]) -> None:
        if not placed:
            return
        self._slots.admit(model, placed)
        one_of_each = {completion.request.prompt_key: slot for slot, completion in placed.items()}
        for slot in one_of_each.values() if self._kept is not None else ():
            owner = self._slots.owners[slot]
            assert owner is not None
            num_tokens = len(owner.request.prompt_token_ids) - 1
            if self._kept is not None and self._kept.takes(num_tokens, self._width(num_tokens)):
                self._keep(owner.request, *self._take(slot, num_tokens, num_tokens))

    def _read_some(self, model: Any, reading: _Reading) -> int:
        """Reads on by as much as one program does; how many tokens these were."""
        most = min(self._config.prefill_chunk_size, reading.width)
        count = min(reading.num_left, most)
        token_ids = reading.request.prompt_token_ids[reading.num_read : reading.num_read + count]
        cells, num_tokens = rectangle([token_ids], 1, self._padded(most)), jnp.int32(count)
        chunk_size = self._slots.tokens_at_once
        reading.row = row_programs.read_on(model, reading.row, cells, num_tokens, chunk_size=chunk_size)
        reading.num_read += count
        return count

    def _finish(self, reading: _Reading) -> None:
        self._slots.put_row(reading.row, reading.num_read, reading.request, reading.slots)
        if self._kept is not None and reading.is_kept:
            self._keep(reading.request, reading.row, reading.width)

    def _keep(self, request: Request, row: Any, width: int) -> None:
        assert self._kept is not None
        salt, token_ids = request.prompt_key
        self._kept.store(Entry(salt, token_ids[:-1], row, width, self._slots.keeps_all))

    def _take(self, slot: int, num_read: int, num_tokens: int) -> tuple[Any, int]:
        """What a slot has read first, in a row with room for so many tokens; and the width of that."""
        width = self._width(num_tokens)
        return self._slots.take_row(slot, num_read, width, self._slots.tokens_at_once), width

    def _width(self, num_tokens: int) -> int:
        """Room of a row for so many tokens."""
        width = _MIN_ROW_WIDTH
        while width < num_tokens:
            width *= 4
        return min(width, self._slots.capacity)
