"""Programs on the cache of one row: a prompt that is read bit by bit, or one that was read before.

Beside `programs`, whose slots such a row leaves and enters. All loops run as often as there is something to do, so that
one program serves prompts of any length.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmask.batch import SamplingBatch
from jaxmask.decoding import Decoding
from jaxmask.history import History
from serve.programs import placed


class RowCache(Protocol):
    """A `Cache` that gives rows away."""

    @property
    def keeps_all(self) -> bool:
        """Whether every token of a row is still there, so that it can be cut to any beginning of what it read."""
        ...

    def take_row(self, row: Int[Array, ""], num_tokens: Int[Array, ""], *, capacity: int, chunk_size: int) -> Any:
        """The first tokens of a row alone, with room for `capacity` in all, to be read on by `chunk_size` at once."""
        ...


@runtime_checkable
class ExtendingModel(Protocol):
    """A `Model` that reads several tokens at once after what it has read, and whose cache is a `RowCache`."""

    def extend(
        self, token_ids: Int[Array, "B C"], counts: Int[Array, " B"], cache: Any
    ) -> tuple[Float[Array, "B C D"], Any]:
        """Hidden states of up to C more tokens per row, and the cache that holds them."""
        ...


@functools.partial(jax.jit, static_argnames=("capacity", "chunk_size"))
def take_row(cache: Any, slot: Int[Array, ""], num_tokens: Int[Array, ""], *, capacity: int, chunk_size: int) -> Any:
    """What a slot has read of its first tokens, as a cache of one row; see `RowCache.take_row`."""
    return cache.take_row(slot, num_tokens, capacity=capacity, chunk_size=chunk_size)


@functools.partial(jax.jit, static_argnames="chunk_size", donate_argnames="row")
def read_on(model: Any, row: Any, token_ids: Int[Array, "1 S"], num_tokens: Int[Array, ""], *, chunk_size: int) -> Any:
    """The row after further tokens.

    Args:
      model: see `ExtendingModel`.
      row: a cache of one row.
      token_ids: right-padded to a multiple of chunk_size.
      num_tokens: how many there are.
      chunk_size: tokens that are read at once.
    """

    def read(chunk: Int[Array, ""], row: Any) -> Any:
        first = chunk * chunk_size
        ids = jax.lax.dynamic_slice_in_dim(token_ids, first, chunk_size, axis=1)
        return model.extend(ids, jnp.clip(num_tokens - first, 0, chunk_size)[None], row)[1]

    return jax.lax.fori_loop(0, (num_tokens + chunk_size - 1) // chunk_size, read, row)


@functools.partial(jax.jit, static_argnames="capacity", donate_argnames="state")
def put_row(
    batch: SamplingBatch,
    state: Decoding,
    row: Any,
    prompt_ids: Int[Array, "1 S"],
    counts: Int[Array, " 4"],
    slots: Int[Array, " B"],
    *,
    capacity: int,
) -> Decoding:
    """The slots with a prompt in some of them that was read before.

    Args:
      batch: settings of all slots, the new completions included.
      state: the slots.
      row: a cache of one row.
      prompt_ids: right-padded.
      counts: tokens of the prompt; those of them that the row has read and keeps; slots in use; the `Finish` code that
        they get.
      slots: where it goes.
      capacity: tokens of a slot.
    """
    length, num_read, num_slots, finish = counts
    one_row = jax.tree.map(lambda leaf: leaf[:1], batch)
    begun = Decoding(
        last_ids=jax.lax.dynamic_index_in_dim(prompt_ids[0], length - 1),
        # To the end of the slot: whatever it held before is gone.
        cache=row.take_row(jnp.int32(0), num_read, capacity=capacity, chunk_size=1),
        history=History.start(prompt_ids, length[None], one_row) if batch.needs_history else None,
        lengths=jnp.zeros(1, jnp.int32),
        finish=finish[None],
    )
    return jax.lax.fori_loop(0, num_slots, lambda entry, state: placed(state, begun, slots[entry]), state)
