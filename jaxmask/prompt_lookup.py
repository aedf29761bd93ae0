"""Guesses at the next tokens from the text so far."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmask.batch import SamplingBatch
from jaxmask.params import check_count
from jaxmask.speculation import Draw
from jaxmask.state import Decoding
from jaxmask.tables import put


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Written:
    """Prompt and output of each row, one after the other: the first `lengths` cells."""

    token_ids: Int[Array, "B L"]
    lengths: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Guesses what followed the last time the same few tokens stood in prompt or output; needs no second model.

    Attributes:
      num_tokens: tokens guessed at each step, k.
      max_ngram: tokens that must be the same, at most; the longest match is taken, and of these the latest.
      min_ngram: and at least.

    Source: Saxena 2023, "Prompt lookup decoding"; vLLM's `ngram` speculation.
    """

    num_tokens: int = dataclasses.field(default=4, metadata={"static": True})
    max_ngram: int = dataclasses.field(default=3, metadata={"static": True})
    min_ngram: int = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_count("num_tokens", self.num_tokens)
        check_count("max_ngram", self.max_ngram)
        check_count("min_ngram", self.min_ngram)
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram must be in [1, max_ngram={self.max_ngram}], got {self.min_ngram}.")

    def start(
        self,
        prompt_ids: Int[Array, "P S"],
        prompt_lengths: Int[Array, " P"],
        *,
        max_new_tokens: int,
        group_size: int,
        prefill_chunk_size: int | None,
    ) -> Written:
        """The prompts, with room for what is generated."""
        del prefill_chunk_size
        padded = jnp.pad(prompt_ids, ((0, 0), (0, max_new_tokens)))
        return Written(jnp.repeat(padded, group_size, axis=0), jnp.repeat(prompt_lengths, group_size))

    def propose(self, state: Decoding, batch: SamplingBatch, draw: Draw) -> tuple[Int[Array, "B K"], Written]:
        """What followed the latest longest match; the last token again where there is none."""
        del batch, draw
        drafts = state.drafts
        ids, lengths = drafts.token_ids, drafts.lengths
        begins = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
        follows = jnp.full(lengths.shape, -1, jnp.int32)
        is_same = jnp.ones(ids.shape, jnp.bool_)
        for size in range(1, self.max_ngram + 1):
            # is_same at cell c: the tokens c - size + 1 .. c are the row's last `size` ones.
            last = jnp.take_along_axis(ids, jnp.maximum(lengths - size, 0)[:, None], axis=1)
            is_same &= (jnp.roll(ids, size - 1, axis=1) == last) & (begins >= size - 1)
            if size >= self.min_ngram:
                latest = jnp.where(is_same & (begins < lengths[:, None] - 1), begins, -1).max(axis=1)
                follows = jnp.where(latest >= 0, latest + 1, follows)
        # What follows up to the end of the text, again and again where that is shorter than the guess.
        ahead = follows[:, None] + jnp.arange(self.num_tokens, dtype=jnp.int32)[None, :] % (lengths - follows)[:, None]
        guesses = jnp.take_along_axis(ids, jnp.maximum(ahead, 0), axis=1)
        return jnp.where((follows >= 0)[:, None], guesses, state.last_ids[:, None]), drafts

    def keep(self, drafts: Written, token_ids: Int[Array, "B C"], counts: Int[Array, " B"]) -> Written:
        """The text with its new tokens."""
        places = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
        token_ids = put(drafts.token_ids, token_ids, drafts.lengths[:, None] + places, counts)
        return Written(token_ids, drafts.lengths + counts)
