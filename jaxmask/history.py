"""What penalties and bad words look back at: prompt and output of each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxmask.batch import SamplingBatch
from jaxmask.params import check_integers


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
          ValueError: number of lists differs from the rows of the batch, an id that is no integer or lies outside the
            vocabulary.
        """
        if not len(prompts) == len(outputs) == batch.num_rows:
            raise ValueError(
                f"prompts and outputs must have one list per row ({batch.num_rows}), got {len(prompts)} and "
                f"{len(outputs)}."
            )
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids = (*check_integers(f"prompt of row {row}", prompt), *check_integers(f"output of row {row}", output))
            outside = [token_id for token_id in ids if not 0 <= token_id < batch.vocab_size]
            if outside:
                raise ValueError(f"history of row {row} holds ids {outside} outside [0, {batch.vocab_size}).")
        prompt_lengths, lengths = (
            jnp.asarray(np.array([len(ids) for ids in lists], np.int32)) for lists in (prompts, outputs)
        )
        return cls.start(_rectangle(prompts), prompt_lengths, batch).extend(_rectangle(outputs), lengths)

    def check_fits(self, batch: SamplingBatch) -> None:
        """Raises ValueError unless this history holds what the edits of `batch` look back at, in its shapes."""
        V, num_rows = batch.vocab_size, batch.num_rows
        needed: dict[str, tuple[int, int]] = {}
        if batch.repetition_penalty is not None:
            needed["in_prompt"] = (num_rows, V)
        if batch.has_penalties:
            needed["output_counts"] = (num_rows, V)
        if batch.bad_words is not None:
            needed["tail"] = (num_rows, batch.bad_words.shape[2] - 1)
        for field, shape in needed.items():
            found = getattr(self, field)
            if found is None or found.shape != shape:
                raise ValueError(
                    f"history.{field} must be {list(shape)} for this batch, got "
                    f"{'none' if found is None else list(found.shape)}: make the history anew for the batch that it "
                    f"is used with."
                )

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

    def extend(self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"]) -> History:
        """The history after the first `lengths` tokens of each row, all at once; what `append` makes one by one."""
        counts, tail = self.output_counts, self.tail
        steps = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
        if counts is not None:
            rows = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
            ids = jnp.where((steps < lengths[:, None]) & (token_ids >= 0), token_ids, counts.shape[1])
            counts = counts.at[rows, ids].add(1, mode="drop")
        if tail is not None:
            both = jnp.concatenate([tail, token_ids], axis=1)
            last = lengths[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None, :]
            tail = jnp.take_along_axis(both, last, axis=1)
        return History(self.in_prompt, counts, tail)


def _rectangle(lists: Sequence[Sequence[int]]) -> Int[Array, "B S"]:
    cells = np.zeros((len(lists), max(map(len, lists), default=0)), np.int32)
    for row, values in zip(cells, lists, strict=True):
        row[: len(values)] = values
    return jnp.asarray(cells)
