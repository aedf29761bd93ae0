"""The support: the ids that survived the filters, per sampled token."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import bits, ragged
from jaxmask.params import check_count, check_integer, check_integers


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
        check_count("width", width)
        return compact(processed_logits, width, width < processed_logits.shape[-1])

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]], vocab_size: int, width: int | None = None) -> Support:
        """One row per list, on the host.

        Args:
          lists: kept ids of each row, in any order, without repeats; an empty list is an empty support.
          vocab_size: number of ids, V.
          width: compact cells per row; the longest list by default. Longer lists go to packed bits too.

        Raises:
          ValueError: an id that is no integer, lies outside [0, V) or is repeated (the row is named), or vocab_size or
            width below 1.
        """
        vocab_size = check_count("vocab_size", vocab_size)
        width = None if width is None else check_count("width", width)
        token_ids, lengths = ragged.flatten(lists, vocab_size)
        cells, counts, packed = ragged.to_cells(token_ids, lengths, vocab_size, width)
        return cls(jnp.asarray(cells), jnp.asarray(counts), None if packed is None else jnp.asarray(packed), vocab_size)

    @classmethod
    def concatenate(cls, supports: Sequence[Support], axis: int = 0) -> Support:
        """The supports one after another along one leading axis.

        Narrow parts grow to the widest; packed bits are kept where any part has them. Runs under jit.

        Args:
          supports: at least one; leading axes are equal but for `axis`.
          axis: a leading axis; negative ones count from the last leading axis.

        Raises:
          ValueError: no supports, different vocabularies, leading axes that do not fit, or no such axis.
        """
        axis = _check_parts(supports, axis)
        width = max(part.width for part in supports)
        has_bits = any(part.packed is not None for part in supports)
        alike = [_grow(part, width, has_bits) for part in supports]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=axis), *alike)

    def split(self, lengths: Sequence[int]) -> list[Support]:
        """Consecutive pieces of the first leading axis, one per length: what `concatenate` joined.

        Raises:
          ValueError: lengths that are no integers, below 0, or do not sum to the first leading axis.
        """
        if not self.shape:
            raise ValueError("split needs a leading axis, got a single support.")
        sizes = check_integers("lengths", lengths)
        if min(sizes, default=0) < 0 or sum(sizes) != len(self):
            raise ValueError(
                f"lengths must be at least 0 and sum to {len(self)}, got {list(sizes)} with sum {sum(sizes)}."
            )
        return [self[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

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
        """Ascending ids on the host, as lists nested like the leading axes (one flat list where there are none).

        Raises:
          ValueError: a row whose count its cells and its packed bits do not hold.
        """
        flat = self.reshape(-1)
        packed = None if flat.packed is None else np.asarray(flat.packed)
        ids, offsets = ragged.from_cells(np.asarray(flat.token_ids), np.asarray(flat.counts), packed, self.vocab_size)
        return ragged.nested((ids[start:end].tolist() for start, end in itertools.pairwise(offsets)), self.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def compact(processed_logits: Float[Array, "*B V"], width: int, has_bits: bool) -> Support:
    """The finite entries of processed logits, by words of 32 ids (see `jaxmask.bits`)."""
    *leading, vocab_size = processed_logits.shape
    words = bits.pack_words(jnp.isfinite(processed_logits.reshape(-1, vocab_size)))
    token_ids, counts = bits.select_ids(words, width, fill=vocab_size)
    packed = bits.words_to_bytes(words, vocab_size) if has_bits else None
    return Support(token_ids, counts, packed, vocab_size).reshape(*leading)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _grow(part: Support, width: int, has_bits: bool) -> Support:
    """The same supports in `width` cells, at least as many as they have; with packed bits if so asked."""
    flat = part.reshape(-1)
    token_ids, packed = flat.token_ids, flat.packed
    if width > part.width and packed is not None:
        # Padding would not do: a row that overflowed its old cells may fit the new ones.
        token_ids, _ = bits.select_ids(_words(packed), width, fill=part.vocab_size)
    elif width > part.width:
        token_ids = jnp.pad(token_ids, ((0, 0), (0, width - part.width)), constant_values=part.vocab_size)
    if has_bits and packed is None:
        packed = bits.pack_ids(token_ids, part.vocab_size)
    return Support(token_ids, flat.counts, packed, part.vocab_size).reshape(*part.shape)


def _check_parts(supports: Sequence[Support], axis: int) -> int:
    """`axis` counted from the first one; raises ValueError unless the supports can be joined along it."""
    if len(supports) == 0:
        raise ValueError("supports must hold at least one Support, got none.")
    shape, vocab_size = supports[0].shape, supports[0].vocab_size
    if not -len(shape) <= check_integer("axis", axis) < len(shape):
        raise ValueError(f"axis must be one of the {len(shape)} leading axes of {shape}, got {axis}.")
    axis %= len(shape)

    others = [size for place, size in enumerate(shape) if place != axis]
    for index, part in enumerate(supports):
        if part.vocab_size != vocab_size:
            raise ValueError(f"vocab_size must be the same, got {vocab_size}, but {part.vocab_size} in part {index}.")
        part_others = [size for place, size in enumerate(part.shape) if place != axis]
        if len(part.shape) != len(shape) or part_others != others:
            raise ValueError(
                f"leading axes must agree but for axis {axis}, got {shape}, but {part.shape} in part {index}."
            )
    return axis


def _words(packed: UInt[Array, "R P"]) -> UInt[Array, "R N"]:
    """The same bits as 32-bit words, those past the last byte 0."""
    padded = jnp.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    return jax.lax.bitcast_convert_type(padded.reshape(packed.shape[0], -1, 4), jnp.uint32)
