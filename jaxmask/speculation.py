"""Speculative decoding: cheap guesses at the next tokens, which the model checks several at a time.

The sampler's noise is a function of (seed, position, token id), so what the model draws at a position is settled by the
tokens before it. A guess counts where it is the very token that the model draws; the first that is not is replaced by
that token. Output, supports and log-probabilities are therefore those of decoding one token at a time (up to rounding,
since the model reads several tokens at once): exact on the truncated law, and reproducible by seed.

Source: Leviathan et al., arXiv 2211.17192; drawing draft and target with common noise: Daliri et al., arXiv 2408.07978.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmask.batch import SamplingBatch
from jaxmask.drawn import Sample
from jaxmask.history import History
from jaxmask.state import Decoding

Draw = Callable[[Array, SamplingBatch, Array, History | None], Sample]


@runtime_checkable
class Speculation(Protocol):
    """Guesses `num_tokens` tokens ahead; a pytree."""

    @property
    def num_tokens(self) -> int:
        """Tokens guessed at each step, k; static."""
        ...

    def start(
        self,
        prompt_ids: Int[Array, "P S"],
        prompt_lengths: Int[Array, " P"],
        *,
        max_new_tokens: int,
        group_size: int,
        prefill_chunk_size: int | None,
    ) -> Any:
        """What it remembers of each of the P G rows before their first token."""
        ...

    def propose(self, state: Decoding, batch: SamplingBatch, draw: Draw) -> tuple[Int[Array, "B K"], Any]:
        """Guesses at the next tokens, ids of the vocabulary, and what `state.drafts` becomes."""
        ...

    def keep(self, drafts: Any, token_ids: Int[Array, "B C"], counts: Int[Array, " B"]) -> Any:
        """What it remembers once the first counts[b] of these tokens are the row's next ones, and no guesses beyond."""
        ...


@runtime_checkable
class RewindableCache(Protocol):
    """A `Cache` that can forget."""

    def rewind(self, counts: Int[Array, " B"]) -> RewindableCache:
        """The cache without each row's last counts[b] tokens."""
        ...


@runtime_checkable
class VerifyingModel(Protocol):
    """A `Model` that reads several tokens at once; its caches can be rewound (`RewindableCache`).

    Its `prefill` takes `extend_size` besides: most tokens that will be read at once, or taken back.
    """

    def extend_logits(
        self, token_ids: Int[Array, "B C"], counts: Int[Array, " B"], cache: Any
    ) -> tuple[Float[Array, "B C V"], Any]:
        """Logits after each of the next counts[b] tokens of each row, and the cache that holds them.

        A token that makes numbers which are not finite must not reach the logits of those before it.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Checked:
    """Guesses, and what the model drew in their places.

    Attributes:
      drawn: the model's own tokens [B, k + 1]: at place j after j guesses.
      num_matching: guesses that are what the model drew, up to the first that is not.
      num_read: tokens that the cache holds besides those before: the last one and guesses.
      cache: the model's.
      drafts: the speculation's.
    """

    drawn: Sample
    num_matching: Int[Array, " B"]
    num_read: Int[Array, " B"]
    cache: Any
    drafts: Any


def verify(
    model: Any,
    speculation: Speculation,
    batch: SamplingBatch,
    state: Decoding,
    room: Int[Array, " B"],
    draw: Draw,
) -> Checked:
    """What the model draws after each guess; all rows read k + 1 tokens, or as many as they have `room` for."""
    guesses, drafts = speculation.propose(state, batch, draw)
    num_rows, num_places = guesses.shape[0], guesses.shape[1] + 1
    inputs = jnp.concatenate([state.last_ids[:, None], guesses], axis=1)
    num_read = jnp.minimum(room, num_places)
    logits, cache = model.extend_logits(inputs, num_read, state.cache)
    places = jnp.tile(jnp.arange(num_places, dtype=jnp.int32), num_rows)

    def at_places(leaf: Array) -> Array:
        return jnp.repeat(leaf, num_places, axis=0)

    history = state.history
    if history is not None:
        history = jax.tree.map(at_places, history).extend(at_places(guesses), places)
    drawn = draw(
        logits.reshape(-1, logits.shape[-1]),
        jax.tree.map(at_places, batch),
        at_places(state.lengths) + places,
        history,
    )
    drawn = jax.tree.map(lambda leaf: leaf.reshape(num_rows, num_places, *leaf.shape[1:]), drawn)
    is_match = (drawn.token_ids[:, :-1] == guesses) & drawn.is_valid[:, :-1]
    num_matching = jnp.cumprod(is_match, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    return Checked(drawn, num_matching, num_read, cache, drafts)
