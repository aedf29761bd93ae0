"""Edits of a rollout, replayed on the ids of its supports: the learner scores the logits that tokens were drawn from.

The same functions as in the sampler (`jaxmask.edits`), on a few ids per token instead of the vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmask import shards
from jaxmask.batch import SamplingBatch
from jaxmask.edits import EditTerms, apply_edits
from jaxmask.history import History
from jaxmask.ragged_support import as_cells
from jaxmask.rollout import Rollout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """What the edits of a rollout need to know to be applied again, on the cells of its supports or on whole rows.

    It depends on the rollout alone: made once, it serves every pass over it and needs no gradient. Every array has the
    rollout's rows first, so it is cut like them.

    Attributes:
      terms: what each edit knew about each kept id when the token was drawn, [B, T, W].
      batch: the settings of each row.
      prompt_ids: of each row, right-padded.
      prompt_lengths: of each row.
      token_ids: the generated ids.
    """

    terms: EditTerms
    batch: SamplingBatch
    prompt_ids: Int[Array, "B S"]
    prompt_lengths: Int[Array, " B"]
    token_ids: Int[Array, "B T"]

    @classmethod
    def of(cls, rollout: Rollout) -> Replay | None:
        """The edits of a rollout; None where it has none. Walks through the outputs once, as generation did.

        Every token of a row counts as output, those of others (`sampled_mask`), too.
        """
        batch = rollout.sampling
        if not batch.is_edited:
            return None
        prompt_ids = jnp.repeat(rollout.prompt_ids, rollout.group_size, axis=0)
        prompt_lengths = jnp.repeat(rollout.prompt_lengths, rollout.group_size)
        history = History.start(prompt_ids, prompt_lengths, batch) if batch.needs_history else None

        def step(history: History | None, position: tuple[Array, ...]) -> tuple[History | None, EditTerms]:
            index, kept_ids, drawn_ids, is_drawn = position
            terms = EditTerms.for_ids(batch, history, jnp.broadcast_to(index, drawn_ids.shape), kept_ids)
            return None if history is None else history.append(drawn_ids, is_drawn), terms

        columns = (as_cells(rollout.support).token_ids, rollout.token_ids, rollout.token_mask)
        steps = jnp.arange(rollout.token_ids.shape[1], dtype=jnp.int32)
        _, terms = jax.lax.scan(step, history, (steps, *(jnp.moveaxis(column, 1, 0) for column in columns)))
        terms = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), terms)
        return cls(terms, batch, prompt_ids, prompt_lengths, rollout.token_ids)

    def edited(self, kept_logits: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Kept logits after the edits, as the sampler made them of whole rows; cells without an id mean nothing."""
        edit = jax.vmap(lambda logits, terms: apply_edits(logits, terms, self.batch), in_axes=1, out_axes=1)
        return edit(kept_logits, self.terms)

    def edited_rows(
        self, logits: Float[Array, "R C"], index: Int[Array, " R"], part: shards.Slice
    ) -> Float[Array, "R C"]:
        """The logits of some tokens after the edits, over all ids or the slice of them that a device holds.

        Args:
          logits: one row per token.
          index: of the tokens, counted through [B, T]; one past the last counts as the last.
          part: the columns of `logits`.
        """
        num_rows, num_tokens = self.token_ids.shape
        row, step = jnp.minimum(index // num_tokens, num_rows - 1), index % num_tokens
        batch, prompt_ids, prompt_lengths, token_ids = jax.tree.map(
            lambda leaf: leaf[row], (self.batch, self.prompt_ids, self.prompt_lengths, self.token_ids)
        )
        history = None
        if batch.needs_history:
            history = History.start(prompt_ids, prompt_lengths, batch).extend(token_ids, step)
        return apply_edits(logits, EditTerms.for_vocabulary(batch, history, step, part), batch)
