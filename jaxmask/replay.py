"""Edits of a rollout, replayed on the ids of its supports: the learner scores the logits that tokens were drawn from.

The same functions as in the sampler (`jaxmask.edits`), on a few ids per token instead of the vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmask.edits import EditTerms, apply_edits
from jaxmask.history import History
from jaxmask.rollout import Rollout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """What the edits of a rollout need to know to be applied again, on the cells of its supports.

    It depends on the rollout alone: made once, it serves every pass over it and needs no gradient.

    Attributes:
      terms: what each edit knew about each kept id when the token was drawn, [B, T, W].
      repetition_penalty: of each row; None where no row uses it.
      frequency_penalty: the same.
      presence_penalty: the same.
    """

    terms: EditTerms
    repetition_penalty: Float[Array, "*B"] | None
    frequency_penalty: Float[Array, "*B"] | None
    presence_penalty: Float[Array, "*B"] | None

    @classmethod
    def of(cls, rollout: Rollout) -> Replay | None:
        """The edits of a rollout; None where it has none. Walks through the outputs once, as generation did."""
        batch = rollout.sampling
        if not batch.is_edited:
            return None
        history = None
        if batch.needs_history:
            prompt_ids = jnp.repeat(rollout.prompt_ids, rollout.group_size, axis=0)
            history = History.start(prompt_ids, jnp.repeat(rollout.prompt_lengths, rollout.group_size), batch)

        def step(history: History | None, position: tuple[Array, ...]) -> tuple[History | None, EditTerms]:
            index, kept_ids, drawn_ids, is_drawn = position
            terms = EditTerms.for_ids(batch, history, jnp.broadcast_to(index, drawn_ids.shape), kept_ids)
            return None if history is None else history.append(drawn_ids, is_drawn), terms

        columns = (rollout.support.token_ids, rollout.token_ids, rollout.loss_mask)
        steps = jnp.arange(rollout.token_ids.shape[1], dtype=jnp.int32)
        _, terms = jax.lax.scan(step, history, (steps, *(jnp.moveaxis(column, 1, 0) for column in columns)))
        terms = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), terms)
        return cls(terms, batch.repetition_penalty, batch.frequency_penalty, batch.presence_penalty)

    def edited(self, kept_logits: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Kept logits after the edits, as the sampler made them of whole rows; cells without an id mean nothing."""
        edit = jax.vmap(lambda logits, terms: apply_edits(logits, terms, self), in_axes=1, out_axes=1)
        return edit(kept_logits, self.terms)
