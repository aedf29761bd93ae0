"""What the host knows of slots, in the shapes that programs take."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmask import SamplingParams
from jaxmask.batch import SamplingBatch
from serve.completions import Completion
from serve.config import bucket
from serve.programs import Arrivals

MIN_PROMPT_WIDTH = 16


def looks_back_at(batch: SamplingBatch) -> tuple[bool, bool, int]:
    """What settles the shapes of a history."""
    num_words = 0 if batch.bad_words is None else batch.bad_words.shape[2]
    return batch.repetition_penalty is not None, batch.has_penalties, num_words


def sizes_of(row: SamplingParams) -> tuple[int, ...]:
    """What settles the shapes of a row's settings."""
    words = row.bad_words or ()
    lists = (row.stop_token_ids or (), row.logit_bias or {}, row.allowed_token_ids or (), words)
    penalties = (row.repetition_penalty != 1, row.frequency_penalty != 0, row.presence_penalty != 0)
    is_withheld = row.min_tokens > 0
    return (*map(len, lists), max(map(len, words), default=0), *penalties, is_withheld, row.ignore_eos)


def arrivals_of(placed: dict[int, Completion], num_slots: int, group_size: int, width: int) -> Arrivals:
    """Completions by their slots, as a program takes them: each prompt once, in rows of `width` cells.

    Args:
      placed: at most as many as there are slots.
      num_slots: of the engine.
      group_size: prompts read at once.
      width: at least the length of each prompt.
    """
    slots_of: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
    for slot, completion in placed.items():
        slots_of.setdefault(completion.request.prompt_key, []).append(slot)
    prompts = [token_ids for _, token_ids in slots_of]
    num_rows = -(-num_slots // group_size) * group_size
    lengths: np.ndarray = np.ones(num_rows, np.int32)
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    sources, slots = (np.zeros(num_slots, np.int32) for _ in range(2))
    sources[: len(placed)] = [source for source, found in enumerate(slots_of.values()) for _ in found]
    slots[: len(placed)] = [slot for found in slots_of.values() for slot in found]
    return Arrivals(
        token_ids=rectangle(prompts, num_rows, width),
        lengths=jnp.asarray(lengths),
        sources=jnp.asarray(sources),
        slots=jnp.asarray(slots),
        num_prompts=jnp.int32(len(prompts)),
        num_rows=jnp.int32(len(placed)),
    )


def prompt_shape(num_tokens: int, chunk_size: int, capacity: int) -> tuple[int, int | None]:
    """Columns for prompts of so many tokens, and how many of them are read at once where that is not all."""
    if num_tokens > chunk_size:
        # As many pieces as there are tokens: one width serves all.
        return capacity, chunk_size
    return bucket(max(num_tokens, MIN_PROMPT_WIDTH), capacity), None


def rectangle(rows: Sequence[Sequence[int]], num_rows: int, width: int) -> Int[Array, "R S"]:
    """Rows of ids, right-padded with 0, below them rows of padding."""
    # Anew each time: a running program may still read the one before.
    cells: np.ndarray = np.zeros((num_rows, width), np.int32)
    for row, values in zip(cells, rows, strict=False):
        row[: len(values)] = values
    return jnp.asarray(cells)
