"""Edits of the logits before the filters: one definition each, elementwise in (id, logit, what happened so far).

An edit never looks at other columns, so the same functions run on full rows [B, V] and on kept columns [B, C];
`EditTerms` holds what they need to know about each column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmask.batch import SamplingBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """What penalties and bad words look back at. Fields nobody needs are None.

    Attributes:
      in_prompt: ids that occur in each row's prompt.
      output_counts: occurrences of each id in the row's output.
      tail: the last output ids, right-aligned, padded with vocab_size.
    """

    in_prompt: Bool[Array, "B V"] | None
    output_counts: Int[Array, "B V"] | None
    tail: Int[Array, "B L"] | None

    @classmethod
    def start(cls, prompt_ids: Int[Array, "B S"], prompt_lengths: Int[Array, " B"], batch: SamplingBatch) -> History:
        """Nothing generated yet. Cells of `prompt_ids` at or past a row's length are never read."""
        V, num_rows = batch.vocab_size, batch.num_rows
        rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        is_prompt = jnp.arange(prompt_ids.shape[1], dtype=jnp.int32)[None, :] < prompt_lengths[:, None]
        ids = jnp.where(is_prompt & (prompt_ids >= 0), prompt_ids, V)
        in_prompt = counts = tail = None
        if batch.repetition_penalty is not None:
            in_prompt = jnp.zeros((num_rows, V), jnp.bool_).at[rows, ids].set(True, mode="drop")
        if batch.has_penalties:
            counts = jnp.zeros((num_rows, V), jnp.int32)
        if batch.bad_words is not None:
            tail = jnp.full((num_rows, batch.bad_words.shape[2] - 1), V, jnp.int32)
        return cls(in_prompt, counts, tail)

    @classmethod
    def from_lists(
        cls, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], batch: SamplingBatch
    ) -> History:
        """The history of given prompts and outputs, one list of ids per row.

        Raises:
          ValueError: number of lists differs from the rows of the batch, or an id is outside the vocabulary.
        """
        if not len(prompts) == len(outputs) == batch.num_rows:
            raise ValueError(
                f"prompts and outputs must have one list per row ({batch.num_rows}), got {len(prompts)} and "
                f"{len(outputs)}."
            )
        for row, ids in enumerate(zip(prompts, outputs, strict=True)):
            outside = [token_id for token_id in (*ids[0], *ids[1]) if not 0 <= token_id < batch.vocab_size]
            if outside:
                raise ValueError(f"history of row {row} holds ids {outside} outside [0, {batch.vocab_size}).")
        history = cls.start(_rectangle(prompts), jnp.asarray(np.array([len(p) for p in prompts], np.int32)), batch)
        lengths = jnp.asarray(np.array([len(o) for o in outputs], np.int32))
        for step, column in enumerate(_rectangle(outputs).T):
            history = history.append(column, step < lengths)
        return history

    def append(self, token_ids: Int[Array, " B"], is_active: Bool[Array, " B"]) -> History:
        """The history after one more token in each active row."""
        counts, tail = self.output_counts, self.tail
        if counts is not None:
            rows = jnp.arange(counts.shape[0], dtype=jnp.int32)
            # A negative id would wrap onto the last ones: past the end it is dropped.
            ids = jnp.where(token_ids < 0, counts.shape[1], token_ids)
            counts = counts.at[rows, ids].add(is_active.astype(jnp.int32), mode="drop")
        if tail is not None:
            shifted = jnp.concatenate([tail, token_ids[:, None]], axis=1)[:, 1:]
            tail = jnp.where(is_active[:, None], shifted, tail)
        return History(self.in_prompt, counts, tail)


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

    is_allowed: Bool[Array, "B C"] | None
    bias: Float[Array, "B C"] | None
    is_withheld: Bool[Array, "B C"] | None
    in_prompt: Bool[Array, "B C"] | None
    output_count: Int[Array, "B C"] | None
    ends_bad_word: Bool[Array, "B C"] | None

    @classmethod
    def for_vocabulary(cls, batch: SamplingBatch, history: History | None, steps: Int[Array, " B"]) -> EditTerms:
        """The terms of every id, columns 0 to V - 1."""
        return cls(
            is_allowed=_allowed_table(batch),
            bias=_bias_table(batch),
            is_withheld=_withheld_table(batch, steps),
            in_prompt=None if history is None else history.in_prompt,
            output_count=None if history is None else history.output_counts,
            ends_bad_word=None if history is None else _bad_word_table(batch, history),
        )

    def at(self, columns: Int[Array, "B C"]) -> EditTerms:
        """The terms of some columns of these."""
        return jax.tree.map(lambda table: jnp.take_along_axis(table, columns, axis=1), self)


def apply_edits(logits: Float[Array, "B C"], terms: EditTerms, batch: SamplingBatch) -> Float[Array, "B C"]:
    """Edited logits, float32; columns that cannot be drawn are -inf.

    Args:
      logits: finite or -inf.
      terms: what is known of these columns.
      batch: the rows' settings.
    """
    for edit in EDITS:
        logits = edit(logits, terms, batch)
    return logits


def allow(logits: Array, terms: EditTerms, batch: SamplingBatch) -> Array:
    """Only allowed ids stay."""
    return logits if terms.is_allowed is None else jnp.where(terms.is_allowed, logits, -jnp.inf)


def add_bias(logits: Array, terms: EditTerms, batch: SamplingBatch) -> Array:
    """x + bias."""
    return logits if terms.bias is None else logits + terms.bias


def withhold(logits: Array, terms: EditTerms, batch: SamplingBatch) -> Array:
    """EOS and stop ids leave while fewer than min_tokens were generated."""
    return logits if terms.is_withheld is None else jnp.where(terms.is_withheld, -jnp.inf, logits)


def penalize_repetition(logits: Array, terms: EditTerms, batch: SamplingBatch) -> Array:
    """x / r where positive, x r elsewhere, for ids in prompt or output. Source: Keskar et al. 2019, section 4.1."""
    if batch.repetition_penalty is None or terms.in_prompt is None or terms.output_count is None:
        return logits
    penalty = batch.repetition_penalty[:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(terms.in_prompt | (terms.output_count > 0), penalized, logits)


def penalize_frequency(logits: Array, terms: EditTerms, batch: SamplingBatch) -> Array:
    """x - f x (count in output)."""
    if batch.frequency_penalty is None or terms.output_count is None:
        return logits
    return logits - batch.frequency_penalty[:, None] * terms.output_count.astype(jnp.float32)


def penalize_presence(logits: Array, terms: EditTerms, batch: SamplingBatch) -> Array:
    """x - p where the id is in the output."""
    if batch.presence_penalty is None or terms.output_count is None:
        return logits
    return logits - batch.presence_penalty[:, None] * (terms.output_count > 0).astype(jnp.float32)


def forbid_bad_words(logits: Array, terms: EditTerms, batch: SamplingBatch) -> Array:
    """The last id of a bad word leaves when its head is the tail of the output."""
    return logits if terms.ends_bad_word is None else jnp.where(terms.ends_bad_word, -jnp.inf, logits)


# The edits do not commute: a bias before the repetition penalty can change the sign that the penalty looks at.
EDITS: tuple[Callable[[Array, EditTerms, SamplingBatch], Array], ...] = (
    allow,
    add_bias,
    withhold,
    penalize_repetition,
    penalize_frequency,
    penalize_presence,
    forbid_bad_words,
)


def _row_index(batch: SamplingBatch) -> Int[Array, "B 1"]:
    return jnp.arange(batch.num_rows, dtype=jnp.int32)[:, None]


def _membership(token_ids: Int[Array, "B N"], batch: SamplingBatch) -> Bool[Array, "B V"]:
    """Which ids are listed; padding is one past the vocabulary and dropped."""
    empty = jnp.zeros((batch.num_rows, batch.vocab_size), jnp.bool_)
    return empty.at[_row_index(batch), token_ids].set(True, mode="drop")


def _allowed_table(batch: SamplingBatch) -> Bool[Array, "B V"] | None:
    if batch.allowed_token_ids is None:
        return None
    is_restricted = (batch.allowed_token_ids < batch.vocab_size).any(axis=1, keepdims=True)
    return _membership(batch.allowed_token_ids, batch) | ~is_restricted


def _bias_table(batch: SamplingBatch) -> Float[Array, "B V"] | None:
    if batch.logit_bias_ids is None:
        return None
    zeros = jnp.zeros((batch.num_rows, batch.vocab_size), jnp.float32)
    return zeros.at[_row_index(batch), batch.logit_bias_ids].add(batch.logit_bias_values, mode="drop")


def _withheld_table(batch: SamplingBatch, steps: Int[Array, " B"]) -> Bool[Array, "B V"] | None:
    if batch.min_tokens is None or batch.withheld_token_ids is None:
        return None
    return _membership(batch.withheld_token_ids, batch) & (steps < batch.min_tokens)[:, None]


def _bad_word_table(batch: SamplingBatch, history: History) -> Bool[Array, "B V"] | None:
    if batch.bad_words is None or history.tail is None:
        return None
    heads, last = batch.bad_words[:, :, :-1], batch.bad_words[:, :, -1]
    # Words are right-aligned like the tail, so a cell of padding is a place the word does not reach back to.
    matches = (heads == batch.vocab_size) | (heads == history.tail[:, None, :])
    return _membership(jnp.where(matches.all(axis=2), last, batch.vocab_size), batch)


def _rectangle(lists: Sequence[Sequence[int]]) -> Int[Array, "B S"]:
    cells = np.zeros((len(lists), max(map(len, lists), default=0)), np.int32)
    for row, values in zip(cells, lists, strict=True):
        row[: len(values)] = values
    return jnp.asarray(cells)
