"""Guesses at the next tokens by a smaller model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmask.batch import SamplingBatch
from jaxmask.params import check_count
from jaxmask.speculation import Draw, Read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Guesses by a smaller model of the same vocabulary, which draws with the noise that the large one will draw with.

    Where the two distributions agree they then draw the same token.

    Attributes:
      model: see `Model`; its caches can be rewound.
      num_tokens: tokens guessed at each step, k.
    """

    model: Any
    num_tokens: int = dataclasses.field(default=4, metadata={"static": True})

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_count("num_tokens", self.num_tokens)

    def start(
        self, prompt_ids: Int[Array, "P S"], prompt_lengths: Int[Array, " P"], *, max_new_tokens: int, group_size: int
    ) -> Any:
        """The draft model's cache of the prompts."""
        # Beyond the last token it reads all its guesses before they are taken back.
        room, width = max_new_tokens + self.num_tokens + 1, prompt_ids.shape[1]
        if width + room > self.model.max_length:
            raise ValueError(
                f"prompt width {width} + max_new_tokens {max_new_tokens} + {self.num_tokens + 1} guesses exceed the "
                f"draft model's max_length {self.model.max_length}."
            )
        capacity = width if group_size > 1 else width + room
        cache = self.model.prefill(
            prompt_ids, prompt_lengths - 1, capacity=capacity, chunk_size=max(width, self.num_tokens + 1)
        )
        return cache.repeat(group_size, capacity=room) if group_size > 1 else cache

    def propose(self, drafts: Any, batch: SamplingBatch, read: Read, draw: Draw) -> tuple[Int[Array, "B K"], Any]:
        """k tokens, drawn one after the other."""
        token_ids, cache, history = read.last_ids, drafts, read.history
        guesses = []
        for place in range(self.num_tokens):
            logits, cache = self.model.decode(token_ids, cache)
            token_ids = draw(logits, batch, read.lengths + place, history).token_ids
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
