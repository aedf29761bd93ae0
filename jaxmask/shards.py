"""The slice of the vocabulary that one device holds, and how slices add up.

Inside `shard_map` every device sees some columns of each row. What is small crosses devices (counts, maxima, masses,
candidate columns); logits never do.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, Shaped


@dataclasses.dataclass(frozen=True)
class Slice:
    """Columns [offset, offset + size) of a row whose other columns lie on the devices along `axes`.

    Attributes:
      size: columns held here, the same on every device.
      axes: mesh axes, in the order of the columns; empty where this device holds whole rows.
      num: slices of a row.
    """

    size: int
    axes: tuple[str, ...] = ()
    num: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this device holds whole rows."""
        return not self.axes

    def offset(self) -> int | Int[Array, ""]:
        """Column of the row at which this slice starts."""
        return 0 if self.is_whole else jax.lax.axis_index(self.axes).astype(jnp.int32) * self.size

    def token_ids(self) -> Int[Array, "1 C"]:
        """The id of each column held here."""
        return self.offset() + jnp.arange(self.size, dtype=jnp.int32)[None, :]

    def columns_of(self, table: Shaped[Array, "B V"]) -> Shaped[Array, "B C"]:
        """This slice of a table that every device holds whole; zeros past the end of the table."""
        padding = self.num * self.size - table.shape[1]
        table = jnp.pad(table, ((0, 0), (0, padding)))
        return table if self.is_whole else jax.lax.dynamic_slice_in_dim(table, self.offset(), self.size, axis=1)

    def picked(self, columns: Shaped[Array, "B C"], token_ids: Int[Array, "B N"]) -> Float[Array, "B N"]:
        """float32 values at some ids of each row, whichever slice holds them; 0 for ids that none does."""
        positions = token_ids - self.offset()
        is_here = (positions >= 0) & (positions < self.size)
        values = jnp.take_along_axis(columns, jnp.where(is_here, positions, 0), axis=1).astype(jnp.float32)
        # One slice has the value and the others 0: added as bits, nothing is rounded or flushed to zero.
        words = jax.lax.bitcast_convert_type(values, jnp.int32)
        return jax.lax.bitcast_convert_type(self.total(jnp.where(is_here, words, 0)), jnp.float32)

    def total(self, values: Num[Array, "*B"]) -> Num[Array, "*B"]:
        """The sum over all slices."""
        return values if self.is_whole else jax.lax.psum(values, self.axes)

    def largest(self, values: Num[Array, "*B"]) -> Num[Array, "*B"]:
        """The maximum over all slices."""
        return values if self.is_whole else jax.lax.pmax(values, self.axes)

    def smallest(self, values: Num[Array, "*B"]) -> Num[Array, "*B"]:
        """The minimum over all slices."""
        return values if self.is_whole else jax.lax.pmin(values, self.axes)

    def joined(self, columns: Shaped[Array, "B C"]) -> Shaped[Array, "B D"]:
        """The columns of all slices side by side, in the order of the slices."""
        return columns if self.is_whole else jax.lax.all_gather(columns, self.axes, axis=1, tiled=True)

    def before(self, counts: Int[Array, " B"]) -> Int[Array, " B"]:
        """The sum over the slices to the left of this one."""
        if self.is_whole:
            return jnp.zeros_like(counts)
        all_counts = jax.lax.all_gather(counts, self.axes)
        is_left = jnp.arange(all_counts.shape[0], dtype=jnp.int32) < jax.lax.axis_index(self.axes)
        return jnp.where(is_left[:, None], all_counts, 0).sum(axis=0)
