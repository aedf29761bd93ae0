"""Guesses at the next tokens by a smaller model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmask.batch import SamplingBatch
from jaxmask.model import Model, prefill_options
from jaxmask.params import check_count
from jaxmask.speculation import Draw
from jaxmask.state import Decoding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Guesses by a smaller model of the same vocabulary, which draws with the noise that the large one will draw with.

    Where the two distributions agree they then draw the same token.

    Attributes:
      model: a `Model` of at least as many ids, whose caches can be rewound and whose `prefill` takes `extend_size`.
      num_tokens: tokens guessed at each step, k.
    """

    model: Any
    num_tokens: int = dataclasses.field(default=4, metadata={"static": True})

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_count("num_tokens", self.num_tokens)

    def start(
        self,
        prompt_ids: Int[Array, "P S"],
        prompt_lengths: Int[Array, " P"],
        *,
        max_new_tokens: int,
        group_size: int,
        prefill_chunk_size: int | None,
    ) -> Any:
        """The draft model's cache of the prompts.

        Raises:
          ValueError: `model` is none, or has no room for its guesses beyond the last token.
        """
        if not isinstance(self.model, Model):
            raise ValueError(f"the draft model must have prefill and decode, got {type(self.model).__name__}.")
        # Beyond the last token it reads all its guesses before they are taken back.
        room, width = max_new_tokens + self.num_tokens + 1, prompt_ids.shape[1]
        if width + room > self.model.max_length:
            raise ValueError(
                f"prompt width {width} + max_new_tokens {max_new_tokens} + {self.num_tokens + 1} guesses exceed the "
                f"draft model's max_length {self.model.max_length}."
            )
        capacity = width if group_size > 1 else width + room
        options = prefill_options(prefill_chunk_size, self.num_tokens + 1)
        cache = self.model.prefill(prompt_ids, prompt_lengths - 1, capacity=capacity, **options)
        return cache.repeat(group_size, capacity=room) if group_size > 1 else cache

    def propose(self, state: Decoding, batch: SamplingBatch, draw: Draw) -> tuple[Int[Array, "B K"], Any]:
        """k tokens, drawn one after the other.

        Raises:
          ValueError: the draft model has fewer ids than the vocabulary.
        """
        token_ids, cache, history = state.last_ids, state.drafts, state.history
        guesses = []
        for place in range(self.num_tokens):
            logits, cache = self.model.decode(token_ids, cache)
            if logits.shape[1] < batch.vocab_size:
                raise ValueError(f"the draft model must have {batch.vocab_size} ids, got {logits.shape[1]}.")
            token_ids = draw(logits, batch, state.lengths + place, history).token_ids
            guesses.append(token_ids)
            if history is not None:
                history = history.append(token_ids, jnp.ones_like(token_ids, jnp.bool_))
        # The last guess is read too: it may be right.
        _, cache = self.model.decode(token_ids, cache)
        return jnp.stack(guesses, axis=1), cache

    def keep(self, drafts: Any, token_ids: Int[Array, "B C"], counts: Int[Array, " B"]) -> Any:
        """The cache without the guesses that were wrong."""
        del token_ids
        return drafts.rewind(self.num_tokens + 1 - counts)
