"""The support: the ids that survived the filters, per sampled token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Support:
    """Kept ids over any leading axes.

    Always: ids ascend; `counts` equals the number of set bits; a row with counts <= W holds all its ids in the first
    `counts` cells, a wider one its lowest W ids there and all of them in `packed`.

    Attributes:
      token_ids: kept ids; unused cells hold `vocab_size`.
      counts: size of each support, which may exceed W where `packed` is present.
      packed: bit j of byte i is id 8 i + j; None where no row can exceed W.
      vocab_size: number of ids, V.
    """

    token_ids: Int[Array, "*B W"]
    counts: Int[Array, "*B"]
    packed: UInt[Array, "*B P"] | None
    vocab_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_logits(cls, processed_logits: Float[Array, "*B V"], width: int) -> Support:
        """The finite entries of processed logits; packed bits are kept where `width` < V.

        Raises:
          ValueError: width below 1.
        """
        _check_width(width)
        return _compact(processed_logits, width)

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]], vocab_size: int, width: int | None = None) -> Support:
        """One row per list, on the host.

        Args:
          lists: kept ids of each row, in any order, without repeats; an empty list is an empty support.
          vocab_size: number of ids, V.
          width: compact cells per row; the longest list by default. Longer lists go to packed bits too.

        Raises:
          ValueError: an id outside [0, V) or a repeated id (the row is named), or width below 1.
        """
        _check_width(width)
        rows = [np.sort(np.asarray(row, np.int64)) for row in lists]
        for index, row in enumerate(rows):
            _check_row(index, row, vocab_size)
        width = max([1, *map(len, rows)]) if width is None else width
        token_ids = np.full((len(rows), width), vocab_size, np.int32)
        for cells, row in zip(token_ids, rows, strict=True):
            cells[: min(len(row), width)] = row[:width]
        counts = np.array([len(row) for row in rows], np.int32).reshape(len(rows))
        packed = jnp.asarray(_pack_rows(rows, vocab_size)) if (counts > width).any() else None
        return cls(jnp.asarray(token_ids), jnp.asarray(counts), packed, vocab_size)

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.counts.shape

    @property
    def width(self) -> int:
        """Compact cells per row, W."""
        return self.token_ids.shape[-1]

    def __len__(self) -> int:
        """Size of the first leading axis."""
        return self.counts.shape[0]

    def __iter__(self) -> Iterator[Support]:
        """The supports along the first leading axis."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Support:
        """The supports at `index` of the leading axes.

        Raises:
          IndexError: a plain integer outside the first axis.
        """
        if isinstance(index, int) and not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} supports.")
        parts = index if isinstance(index, tuple) else (index,)
        # The axis of the cells stays whole; one index holds at most one ellipsis.
        rest = slice(None) if any(part is ... for part in parts) else ...
        packed = None if self.packed is None else self.packed[(*parts, rest)]
        return Support(self.token_ids[(*parts, rest)], self.counts[index], packed, self.vocab_size)

    def reshape(self, *leading: int) -> Support:
        """The same supports under other leading axes."""
        packed = None if self.packed is None else self.packed.reshape(*leading, self.packed.shape[-1])
        return Support(
            self.token_ids.reshape(*leading, self.width), self.counts.reshape(leading), packed, self.vocab_size
        )

    def cells(self) -> Bool[Array, "*B W"]:
        """Which compact cells hold a kept id."""
        return self.token_ids < self.vocab_size

    def contains(self, token_ids: Int[Array, "*B"]) -> Bool[Array, "*B"]:
        """Whether each id lies in its support; ids outside [0, V) do not."""
        in_cells = (self.token_ids == token_ids[..., None]).any(axis=-1)
        if self.packed is not None:
            byte_index = jnp.clip(token_ids >> 3, 0, self.packed.shape[-1] - 1)
            byte = jnp.take_along_axis(self.packed, byte_index[..., None], axis=-1)[..., 0]
            in_cells |= ((byte >> (token_ids & 7).astype(jnp.uint8)) & jnp.uint8(1)).astype(jnp.bool_)
        return in_cells & (token_ids >= 0) & (token_ids < self.vocab_size)

    def to_mask(self) -> Bool[Array, "*B V"]:
        """The kept set over the vocabulary; builds [*B, V]."""
        if self.packed is not None:
            return bits.unpack_bytes(self.packed, self.vocab_size)
        flat_ids = self.token_ids.reshape(-1, self.width)
        rows = jnp.arange(flat_ids.shape[0], dtype=jnp.int32)[:, None]
        mask = jnp.zeros((flat_ids.shape[0], self.vocab_size), jnp.bool_)
        # Unused cells hold vocab_size, one past the end: dropped.
        return mask.at[rows, flat_ids].set(True, mode="drop").reshape(*self.shape, self.vocab_size)

    def to_lists(self) -> list[Any]:
        """Ascending ids on the host, as lists nested like the leading axes (one flat list where there are none)."""
        token_ids, counts = np.asarray(self.token_ids), np.asarray(self.counts)
        packed = None if self.packed is None else np.asarray(self.packed)

        def row(index: tuple[int, ...]) -> list[int]:
            if counts[index] <= self.width or packed is None:
                return [int(token_id) for token_id in token_ids[index][: counts[index]]]
            kept = np.unpackbits(packed[index], bitorder="little", count=self.vocab_size)
            return [int(token_id) for token_id in np.flatnonzero(kept)]

        def nest(index: tuple[int, ...]) -> list[Any]:
            if len(index) == counts.ndim:
                return row(index)
            return [nest((*index, i)) for i in range(counts.shape[len(index)])]

        return nest(())


@functools.partial(jax.jit, static_argnums=1)
def _compact(processed_logits: Float[Array, "*B V"], width: int) -> Support:
    *leading, vocab_size = processed_logits.shape
    words = bits.pack_words(jnp.isfinite(processed_logits.reshape(-1, vocab_size)))
    token_ids, counts = bits.select_ids(words, width, fill=vocab_size)
    packed = bits.words_to_bytes(words, vocab_size) if width < vocab_size else None
    return Support(token_ids, counts, packed, vocab_size).reshape(*leading)


def _pack_rows(rows: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    packed = np.zeros((len(rows), -(-vocab_size // 8)), np.uint8)
    for cells, row in zip(packed, rows, strict=True):
        np.bitwise_or.at(cells, row >> 3, (1 << (row & 7)).astype(np.uint8))
    return packed


def _check_width(width: int | None) -> None:
    if width is not None and width < 1:
        raise ValueError(f"width must be at least 1, got {width}.")


def _check_row(index: int, row: np.ndarray, vocab_size: int) -> None:
    if len(row) and not (row[0] >= 0 and row[-1] < vocab_size):
        outside = row[(row < 0) | (row >= vocab_size)].tolist()
        raise ValueError(f"support of row {index} holds ids {outside} outside [0, {vocab_size}).")
    if (np.diff(row) == 0).any():
        raise ValueError(f"support of row {index} repeats ids {row[1:][np.diff(row) == 0].tolist()}.")
