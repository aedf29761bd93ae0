"""Edits of the logits before the filters: one definition each, elementwise in (id, logit, what happened so far).

An edit never looks at other columns, so the same functions run on full rows [B, V] and on kept columns [B, C];
`EditTerms` holds what they need to know about each column. The sampler runs them on the vocabulary, or on the slice of
it that a device holds; a learner replays them on the ids of the recorded supports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxmask import shards
from jaxmask.batch import SamplingBatch
from jaxmask.history import History


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EditTerms:
    """What each edit knows about each column; None where no row uses the edit.

    Attributes:
      is_allowed: the row may draw this id.
      bias: added to the logit.
      is_withheld: EOS or stop id while fewer than min_tokens were generated.
      in_prompt: the id occurs in the prompt.
      output_count: occurrences in the output.
      ends_bad_word: drawing the id would complete a bad word.
    """

    is_allowed: Bool[Array, "*B C"] | None
    bias: Float[Array, "*B C"] | None
    is_withheld: Bool[Array, "*B C"] | None
    in_prompt: Bool[Array, "*B C"] | None
    output_count: Int[Array, "*B C"] | None
    ends_bad_word: Bool[Array, "*B C"] | None

    @classmethod
    def for_vocabulary(
        cls,
        batch: SamplingBatch,
        history: History | None,
        steps: Int[Array, " B"],
        part: shards.Slice | None = None,
    ) -> EditTerms:
        """The terms of every id, columns 0 to V - 1, or of a slice of the vocabulary."""
        part = shards.Slice(batch.vocab_size) if part is None else part
        in_prompt, output_count = _tables(history)
        return cls(
            **_listed(batch, history, steps, lambda ids, values: _scatter(ids, values, part)),
            in_prompt=None if in_prompt is None else part.columns_of(in_prompt),
            output_count=None if output_count is None else part.columns_of(output_count),
        )

    @classmethod
    def for_ids(
        cls, batch: SamplingBatch, history: History | None, steps: Int[Array, " B"], token_ids: Int[Array, "B C"]
    ) -> EditTerms:
        """The terms of some ids of each row, such as those of its support; [B, V] is not built."""
        in_prompt, output_count = _tables(history)
        # Unused cells of a support hold V: what is read for them means nothing.
        columns = jnp.minimum(token_ids, batch.vocab_size - 1)
        return cls(
            **_listed(batch, history, steps, lambda ids, values: _look_up(ids, values, token_ids)),
            in_prompt=None if in_prompt is None else jnp.take_along_axis(in_prompt, columns, axis=1),
            output_count=None if output_count is None else jnp.take_along_axis(output_count, columns, axis=1),
        )


@runtime_checkable
class Penalties(Protocol):
    """The penalties of each row, None where no row uses them."""

    @property
    def repetition_penalty(self) -> Float[Array, " B"] | None:
        """1 is off."""

    @property
    def frequency_penalty(self) -> Float[Array, " B"] | None:
        """0 is off."""

    @property
    def presence_penalty(self) -> Float[Array, " B"] | None:
        """0 is off."""


def apply_edits(logits: Float[Array, "B C"], terms: EditTerms, rows: Penalties) -> Float[Array, "B C"]:
    """Edited logits, float32; columns that cannot be drawn are -inf.

    Args:
      logits: finite or -inf.
      terms: what is known of these columns.
      rows: the rows' penalties: a `SamplingBatch`, or what a learner keeps of one.
    """
    for edit in EDITS:
        logits = edit(logits, terms, rows)
    return logits


def allow(logits: Array, terms: EditTerms, rows: Penalties) -> Array:
    """Only allowed ids stay."""
    return logits if terms.is_allowed is None else jnp.where(terms.is_allowed, logits, -jnp.inf)


def add_bias(logits: Array, terms: EditTerms, rows: Penalties) -> Array:
    """x + bias."""
    return logits if terms.bias is None else logits + terms.bias


def withhold(logits: Array, terms: EditTerms, rows: Penalties) -> Array:
    """EOS and stop ids leave while fewer than min_tokens were generated."""
    return logits if terms.is_withheld is None else jnp.where(terms.is_withheld, -jnp.inf, logits)


def penalize_repetition(logits: Array, terms: EditTerms, rows: Penalties) -> Array:
    """x / r where positive, x r elsewhere, for ids in prompt or output. Source: Keskar et al. 2019, section 4.1."""
    if rows.repetition_penalty is None or terms.in_prompt is None or terms.output_count is None:
        return logits
    penalty = rows.repetition_penalty[:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(terms.in_prompt | (terms.output_count > 0), penalized, logits)


def penalize_frequency(logits: Array, terms: EditTerms, rows: Penalties) -> Array:
    """x - f x (count in output)."""
    if rows.frequency_penalty is None or terms.output_count is None:
        return logits
    return logits - rows.frequency_penalty[:, None] * terms.output_count.astype(jnp.float32)


def penalize_presence(logits: Array, terms: EditTerms, rows: Penalties) -> Array:
    """x - p where the id is in the output."""
    if rows.presence_penalty is None or terms.output_count is None:
        return logits
    return logits - rows.presence_penalty[:, None] * (terms.output_count > 0).astype(jnp.float32)


def forbid_bad_words(logits: Array, terms: EditTerms, rows: Penalties) -> Array:
    """The last id of a bad word leaves when its head is the tail of the output."""
    return logits if terms.ends_bad_word is None else jnp.where(terms.ends_bad_word, -jnp.inf, logits)


# The edits do not commute: a bias before the repetition penalty can change the sign that the penalty looks at.
EDITS: tuple[Callable[[Array, EditTerms, Penalties], Array], ...] = (
    allow,
    add_bias,
    withhold,
    penalize_repetition,
    penalize_frequency,
    penalize_presence,
    forbid_bad_words,
)


def _tables(history: History | None) -> tuple[Bool[Array, "B V"] | None, Int[Array, "B V"] | None]:
    return (None, None) if history is None else (history.in_prompt, history.output_counts)


def _listed(
    batch: SamplingBatch,
    history: History | None,
    steps: Int[Array, " B"],
    spread: Callable[[Int[Array, "B N"], Array], Array],
) -> dict[str, Array | None]:
    """The terms that come as lists of ids; `spread` brings a value for each listed id to the columns."""

    def is_listed(ids: Int[Array, "B N"]) -> Bool[Array, "B C"]:
        return spread(ids, jnp.ones(ids.shape, jnp.bool_))

    is_allowed = bias = is_withheld = ends_bad_word = None
    if batch.allowed_token_ids is not None:
        is_restricted = (batch.allowed_token_ids < batch.vocab_size).any(axis=1, keepdims=True)
        is_allowed = is_listed(batch.allowed_token_ids) | ~is_restricted
    if batch.logit_bias_ids is not None and batch.logit_bias_values is not None:
        bias = spread(batch.logit_bias_ids, batch.logit_bias_values)
    if batch.min_tokens is not None and batch.withheld_token_ids is not None:
        is_withheld = is_listed(batch.withheld_token_ids) & (steps < batch.min_tokens)[:, None]
    if batch.bad_words is not None and history is not None and history.tail is not None:
        ends_bad_word = is_listed(_ends_of_bad_words(batch.bad_words, history.tail, batch.vocab_size))
    return {"is_allowed": is_allowed, "bias": bias, "is_withheld": is_withheld, "ends_bad_word": ends_bad_word}


def _scatter(ids: Int[Array, "B N"], values: Shaped[Array, "B N"], part: shards.Slice) -> Shaped[Array, "B C"]:
    """The value of each listed id at its column, 0 elsewhere; padding and ids of other slices drop out."""
    columns = ids - part.offset()
    # A negative index would wrap onto the last columns; past the end it is dropped.
    columns = jnp.where(columns >= 0, columns, part.size)
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros((ids.shape[0], part.size), values.dtype).at[rows, columns].set(values, mode="drop")


def _look_up(
    ids: Int[Array, "B N"], values: Shaped[Array, "B N"], token_ids: Int[Array, "B C"]
) -> Shaped[Array, "B C"]:
    """The value of each id that is asked for, 0 where it is not listed."""
    is_same = ids[:, :, None] == token_ids[:, None, :]
    return jnp.where(is_same, values[:, :, None], jnp.zeros((), values.dtype)).sum(axis=1).astype(values.dtype)


def _ends_of_bad_words(words: Int[Array, "B M L"], tail: Int[Array, "B K"], padding: int) -> Int[Array, "B M"]:
    """Last ids of the words whose heads the outputs end with; padding for the others."""
    heads, last = words[:, :, :-1], words[:, :, -1]
    # Words are right-aligned like the tail, so a cell of padding is a place the word does not reach back to.
    matches = (heads == padding) | (heads == tail[:, None, :])
    return jnp.where(matches.all(axis=2), last, padding)
