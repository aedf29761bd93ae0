"""Tables that new tokens are written to, step by step: one column per token, or kept ids one after another."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask.batch import SamplingBatch
from jaxmask.drawn import Sample, TopLogprobs
from jaxmask.ragged_support import RaggedSupport
from jaxmask.sampling import needs_bits
from jaxmask.support import Support
from jaxmask.tables import put


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewTokens:
    """What a step added to each row: its first `counts` cells; the others hold padding and empty supports.

    Attributes:
      token_ids: at most C per row; C is 1 without speculation.
      logprobs: of each token.
      support: what each was drawn from.
      counts: tokens that count; 0 for rows that had finished, or found nothing to draw from.
      ranks: of each token; None unless `num_logprobs` was given.
      top: the likeliest tokens at each place; None unless `num_logprobs` was given.
    """

    token_ids: Int[Array, "B C"]
    logprobs: Float[Array, "B C"]
    support: Support
    counts: Int[Array, " B"]
    ranks: Int[Array, "B C"] | None = None
    top: TopLogprobs | None = None

    @classmethod
    def first(cls, counts: Int[Array, " B"], drawn: Sample, pad_token_id: int) -> NewTokens:
        """The first counts[b] of the tokens [B, C] that each row drew."""
        support, top, ranks, V = drawn.support, drawn.top, drawn.ranks, drawn.support.vocab_size
        is_kept = jnp.arange(drawn.token_ids.shape[1], dtype=jnp.int32)[None, :] < counts[:, None]
        in_cells = is_kept[:, :, None]
        kept = Support(
            jnp.where(in_cells, support.token_ids, V),
            jnp.where(is_kept, support.counts, 0),
            None if support.packed is None else jnp.where(in_cells, support.packed, jnp.uint8(0)),
            V,
        )
        if top is not None:
            top = TopLogprobs(jnp.where(in_cells, top.token_ids, V), jnp.where(in_cells, top.logprobs, -jnp.inf))
        return cls(
            token_ids=jnp.where(is_kept, drawn.token_ids, pad_token_id),
            logprobs=jnp.where(is_kept, drawn.logprobs, 0.0),
            support=kept,
            counts=counts,
            ranks=None if ranks is None else jnp.where(is_kept, ranks, 0),
            top=top,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recording:
    """Tokens that rows generated since they had `starts` of them; column t of row b is its token starts[b] + t.

    Attributes:
      token_ids: padding where nothing was written.
      logprobs: 0 there.
      support: empty there.
      starts: tokens of each row before the first column.
      num_steps: steps that each row took.
      ranks: of each token; None unless asked for.
      top: the likeliest tokens; None unless asked for.
    """

    token_ids: Int[Array, "B T"]
    logprobs: Float[Array, "B T"]
    support: Support | RaggedSupport
    starts: Int[Array, " B"]
    num_steps: Int[Array, " B"]
    ranks: Int[Array, "B T"] | None = None
    top: TopLogprobs | None = None

    @classmethod
    def empty(
        cls,
        batch: SamplingBatch,
        num_columns: int,
        *,
        width: int,
        starts: Int[Array, " B"] | None = None,
        pad_token_id: int = 0,
        num_logprobs: int | None = None,
        max_ids: int | None = None,
    ) -> Recording:
        """Tables with nothing in them.

        Args:
          batch: the rows' settings.
          num_columns: most tokens of a row, T.
          width: compact cells per support, W.
          starts: tokens that the rows have; None: none.
          pad_token_id: where nothing is written.
          num_logprobs: top tokens at each place; None: neither these nor ranks.
          max_ids: room for kept ids of all rows together, one after another; None: W cells for each token.
        """
        B, T, V = batch.num_rows, num_columns, batch.vocab_size
        zeros = jnp.zeros((B, T), jnp.int32)
        top = None
        if num_logprobs is not None:
            shape = (B, T, num_logprobs)
            top = TopLogprobs(jnp.full(shape, V, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))
        if max_ids is None:
            packed = jnp.zeros((B, T, -(-V // 8)), jnp.uint8) if needs_bits(batch, width) else None
            support = Support(jnp.full((B, T, width), V, jnp.int32), zeros, packed, V)
        return cls(
            token_ids=jnp.full((B, T), pad_token_id, jnp.int32),
            logprobs=jnp.zeros((B, T), jnp.float32),
            support=support if max_ids is None else RaggedSupport.empty((B, T), max_ids, width, V),
            starts=jnp.zeros(B, jnp.int32) if starts is None else starts,
            num_steps=jnp.zeros(B, jnp.int32),
            ranks=None if num_logprobs is None else zeros,
            top=top,
        )

    def write(
        self, new: NewTokens, lengths: Int[Array, " B"], is_running: Bool[Array, " B"]
    ) -> tuple[Recording, Int[Array, " B"]]:
        """The tables after a step, and how many tokens of each row they took: fewer where a support found no room.

        Args:
          new: what the step added.
          lengths: tokens of each row before it.
          is_running: rows that took the step.
        """
        columns = (lengths - self.starts)[:, None] + jnp.arange(new.token_ids.shape[1], dtype=jnp.int32)[None, :]
        counts = new.counts
        if isinstance(self.support, Support):
            support = put(self.support, new.support, columns, counts)
        else:
            support, counts = self.support.write(new.support, columns, counts)
        written = dataclasses.replace(
            self,
            token_ids=put(self.token_ids, new.token_ids, columns, counts),
            logprobs=put(self.logprobs, new.logprobs, columns, counts),
            support=support,
            num_steps=self.num_steps + is_running.astype(jnp.int32),
            ranks=put(self.ranks, new.ranks, columns, counts),
            top=put(self.top, new.top, columns, counts),
        )
        return written, counts
