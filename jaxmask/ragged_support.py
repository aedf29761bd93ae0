"""Supports of a rollout stored one after another: memory follows the ids that were kept, not the widest support."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmask import ragged
from jaxmask.params import check_count
from jaxmask.support import Support
from jaxmask.tables import put

MAX_IDS = 2**30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedSupport:
    """Kept ids of tokens, in the order in which they were written; one pool for all rows.

    A token's ids are `token_ids[offsets : offsets + counts]`, ascending. Four bytes an id and eight a token, where a
    `Support` takes 4 W + 4 bytes a token.

    Attributes:
      token_ids: the pool; unused cells hold `vocab_size`.
      offsets: where each token's ids begin.
      counts: how many it has; 0 where nothing was sampled.
      num_used: cells of the pool in use.
      width: most ids of a token.
      vocab_size: number of ids, V.
    """

    token_ids: Int[Array, " N"]
    offsets: Int[Array, "*B"]
    counts: Int[Array, "*B"]
    num_used: Int[Array, ""]
    width: int = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, shape: tuple[int, int], max_ids: int, width: int, vocab_size: int) -> RaggedSupport:
        """Tokens of the given shape (B, T) without supports, and room for `max_ids` ids.

        Raises:
          ValueError: max_ids outside [1, 2^30].
        """
        max_ids = check_count("max_ids", max_ids)
        # Offsets are int32, and a step may ask for more than there is.
        if max_ids > MAX_IDS:
            raise ValueError(f"max_ids must be at most {MAX_IDS}, got {max_ids}.")
        zeros = jnp.zeros(shape, jnp.int32)
        pool = jnp.full(max_ids, vocab_size, jnp.int32)
        return cls(pool, zeros, zeros, jnp.int32(0), width, vocab_size)

    def write(
        self, support: Support, columns: Int[Array, "B C"], counts: Int[Array, " B"]
    ) -> tuple[RaggedSupport, Int[Array, " B"]]:
        """The pool with the supports of each row's first counts[b] new tokens, and how many of these found room.

        Args:
          support: of new tokens [B, C], none wider than its cells.
          columns: where in the row each token goes.
          counts: tokens of each row that count.
        """
        places = jnp.arange(columns.shape[1], dtype=jnp.int32)[None, :]
        sizes = jnp.where(places < counts[:, None], support.counts, 0)
        begins, num_kept, num_used = self._places(sizes, counts)
        cells = jnp.arange(support.width, dtype=jnp.int32)[None, None, :]
        is_id = (places < num_kept[:, None])[:, :, None] & (cells < sizes[:, :, None])
        targets = jnp.where(is_id, begins[:, :, None] + cells, self.token_ids.shape[0])
        written = dataclasses.replace(
            self,
            token_ids=self.token_ids.at[targets.reshape(-1)].set(support.token_ids.reshape(-1), mode="drop"),
            offsets=put(self.offsets, begins, columns, num_kept),
            counts=put(self.counts, sizes, columns, num_kept),
            num_used=num_used,
        )
        return written, num_kept

    def _places(
        self, sizes: Int[Array, "B C"], counts: Int[Array, " B"]
    ) -> tuple[Int[Array, "B C"], Int[Array, " B"], Int[Array, ""]]:
        """Where each token's ids begin, how many tokens of each row have room, and the cells in use afterwards."""
        ends = self.num_used + jnp.cumsum(sizes.reshape(-1), dtype=jnp.int32).reshape(sizes.shape)

        def all_fit() -> tuple[Array, Array, Array]:
            return ends - sizes, counts, ends[-1, -1]

        def one_by_one() -> tuple[Array, Array, Array]:
            def place_row(used: Array, row: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
                row_ends = used + jnp.cumsum(row[0], dtype=jnp.int32)
                fits = (row_ends <= self.token_ids.shape[0]) | (row[0] == 0)
                num_kept = jnp.minimum(jnp.cumprod(fits, dtype=jnp.int32).sum(dtype=jnp.int32), row[1])
                after = jnp.where(num_kept > 0, row_ends[jnp.maximum(num_kept - 1, 0)], used)
                return after, (row_ends - row[0], num_kept)

            used, (begins, num_kept) = jax.lax.scan(place_row, self.num_used, (sizes, counts))
            return begins, num_kept, used

        # Row after row is slow, and needed only where some row asks for more than is left.
        return jax.lax.cond(ends[-1, -1] <= self.token_ids.shape[0], all_fit, one_by_one)

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading axes."""
        return self.counts.shape

    def to_support(self) -> Support:
        """The same supports as cells [*B, W]. Runs under jit."""
        shape = (*self.counts.shape, self.width)
        cells = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        is_id = cells < self.counts[..., None]
        index = jnp.where(is_id, self.offsets[..., None] + cells, 0)
        return Support(jnp.where(is_id, self.token_ids[index], self.vocab_size), self.counts, None, self.vocab_size)

    def to_lists(self) -> list[Any]:
        """Ascending ids on the host, as lists nested like the leading axes."""
        pool, offsets, counts = (np.asarray(leaf) for leaf in (self.token_ids, self.offsets, self.counts))
        places = zip(offsets.reshape(-1).tolist(), counts.reshape(-1).tolist(), strict=True)
        return ragged.nested((pool[begin : begin + size].tolist() for begin, size in places), counts.shape)

    def __getitem__(self, index: Any) -> RaggedSupport:
        """The supports at an index of the leading axes; the pool stays whole."""
        return dataclasses.replace(self, offsets=self.offsets[index], counts=self.counts[index])

    def rows(self, first: Int[Array, ""] | int, num_rows: int) -> RaggedSupport:
        """The supports of `num_rows` rows from `first` on; the pool stays whole. Runs under jit."""
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=num_rows)
        return dataclasses.replace(self, offsets=cut(self.offsets), counts=cut(self.counts))


def as_cells(support: Support | RaggedSupport) -> Support:
    """The supports as cells, however they are stored."""
    return support if isinstance(support, Support) else support.to_support()
