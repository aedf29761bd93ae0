"""A decoder-only transformer: teacher forcing for learners, prefill and decode for samplers.

The module is its own parameter pytree: every leaf is a float array, so it goes straight into jit, grad and Optax.
Nothing here knows about tokens' text or sampling.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmask.scoring import soft_cap
from models.attend import attend, attend_cache
from models.block import Layer, Rotary, norm_weight, normal, normed, rotary_tables, used
from models.cache import KVCache
from models.config import DecoderConfig, require_count
from models.layers import apart, head_logits
from models.sharding import MeshRules


class Decoder(nnx.Module):
    """A causal language model; see `DecoderConfig` for what it can compute, and `MeshRules` for meshes."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        """Random weights for training from scratch; computation is in `config.compute_dtype`, or the weights' dtype."""
        self.config = config
        self.rules: MeshRules | None = None
        self.embedding = normal(rngs, (config.vocab_size, config.width), dtype)
        self.layers = nnx.List([Layer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.final_norm = norm_weight(config, config.width, dtype)
        if not config.tie_embeddings:
            self.lm_head = normal(rngs, (config.vocab_size, config.width), dtype)

    @property
    def vocab_size(self) -> int:
        """Number of token ids (V)."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest context the model was made for, in tokens."""
        return self.config.max_length

    @property
    def head(self) -> Float[Array, "V D"]:
        """One row per token: hidden . head[v] is token v's logit, before a soft-cap; in the dtype of computation."""
        return self._weight("embedding" if self.config.tie_embeddings else "lm_head")

    @property
    def logit_softcap(self) -> float | None:
        """The soft-cap of the logits; None for none."""
        return self.config.logit_softcap

    @property
    def logits_sharding(self) -> NamedSharding | None:
        """How the logits [B, V] are cut on the decoder's mesh; None on one device."""
        return None if self.rules is None else self.rules.logits(self.vocab_size)

    def hidden(self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        """Final hidden states after the last norm, under teacher forcing.

        Args:
          token_ids: right-padded rows, each starting at position 0.
          lengths: tokens of each row, in [0, T]; cells past them are read as token 0, so that no junk there reaches
            any number. Without lengths every cell is read; causality keeps later cells out of earlier ones.

        Raises:
          ValueError: T is not in [1, max_length].
        """
        hidden, rotaries = self._start(token_ids, lengths)
        for index, layer in enumerate(self.layers):
            run = functools.partial(_forward, index=index)
            hidden, _, _ = (jax.checkpoint(run) if self.config.remat else run)(layer, hidden, rotaries[index])
        return self._final(hidden)

    def logits(self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T V"]:
        """float32 logits of the token after each cell; arguments as in `hidden`."""
        return self._logits(self.hidden(token_ids, lengths))

    def prefill(
        self,
        token_ids: Int[Array, "P S"],
        lengths: Int[Array, " P"],
        *,
        capacity: int,
        chunk_size: int | None = None,
        extend_size: int = 1,
    ) -> KVCache:
        """A cache that holds the first lengths[p] tokens of each right-padded row; no logits are computed.

        Args:
          token_ids: prompts; cells past a row's length are never read.
          lengths: tokens to hold, in [0, S].
          capacity: slots per row, >= S.
          chunk_size: places read at once, which bounds the memory of long prompts; None: all of them.
          extend_size: most tokens that `extend` will add, or `rewind` take back, at once.

        Raises:
          ValueError: capacity is below S or beyond max_length, or chunk_size or extend_size is below 1.
        """
        if chunk_size is None or chunk_size >= token_ids.shape[1]:
            return self.read(token_ids, lengths, capacity=capacity, chunk_size=extend_size)[1]
        require_count("chunk_size", chunk_size)
        cache = self._empty_cache(token_ids, capacity, max(chunk_size, extend_size))
        return self._prefill_chunks(token_ids, lengths.astype(jnp.int32), cache, chunk_size)

    def read(
        self, token_ids: Int[Array, "P S"], lengths: Int[Array, " P"], *, capacity: int, chunk_size: int = 1
    ) -> tuple[Float[Array, "P S D"], KVCache]:
        """Final hidden states as in `hidden`, and the cache that `prefill` leaves.

        Args:
          token_ids: prompts; cells past a row's length are never read.
          lengths: tokens to hold, in [0, S].
          capacity: slots per row, >= S.
          chunk_size: most tokens that `extend` will add at once.

        Raises:
          ValueError: capacity is below S or beyond max_length, or chunk_size is below 1.
        """
        cache = self._empty_cache(token_ids, capacity, chunk_size)
        hidden, rotaries = self._start(token_ids, lengths)
        for index, layer in enumerate(self.layers):
            hidden, keys, values = _forward(layer, hidden, rotaries[index], index=index)
            cache = cache.fill(index, keys, values, lengths)
        return self._final(hidden), replace(cache, lengths=lengths.astype(jnp.int32))

    def decode(self, token_ids: Int[Array, " B"], cache: KVCache) -> tuple[Float[Array, "B V"], KVCache]:
        """float32 logits after one more token per row, and the cache that holds it.

        A row whose cache is full is left as it is; its logits mean nothing.

        Args:
          token_ids: the token at position cache.lengths[b] of row b.
          cache: the tokens before it.
        """
        hidden, cache = self.extend(token_ids[:, None], jnp.ones_like(cache.lengths), cache)
        return self._logits(hidden[:, 0]), cache

    def extend(
        self, token_ids: Int[Array, "B C"], counts: Int[Array, " B"], cache: KVCache
    ) -> tuple[Float[Array, "B C D"], KVCache]:
        """Final hidden states of up to C more tokens per row, and the cache that holds them.

        Args:
          token_ids: the tokens at positions cache.lengths[b] and on of row b, right-padded.
          counts: tokens of each row, in [0, C]; those past the row's capacity are dropped, and states past the count
            mean nothing.
          cache: the tokens before them.

        Raises:
          ValueError: C exceeds the cache's chunk_size, and a layer's window has no slots for it.
        """
        return self._extend(token_ids, counts, cache)

    def extend_logits(
        self, token_ids: Int[Array, "B C"], counts: Int[Array, " B"], cache: KVCache
    ) -> tuple[Float[Array, "B C V"], KVCache]:
        """float32 logits of the token after each of up to C more, as in `extend`, and the cache that holds them.

        The tokens may be guesses: one whose numbers are not finite reaches no other, before or after it. A row with a
        count of 0 is left as it is. `KVCache.rewind` takes tokens back.
        """
        hidden, cache = self._extend(token_ids, counts, cache, are_guesses=True)
        return self._logits(hidden), cache

    def _extend(
        self, token_ids: Int[Array, "B C"], counts: Int[Array, " B"], cache: KVCache, are_guesses: bool = False
    ) -> tuple[Float[Array, "B C D"], KVCache]:
        cache.check_chunk(token_ids.shape[1])
        places = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        positions = cache.lengths[:, None] + places
        rotaries = rotary_tables(positions, self.config)
        hidden = self._embed(jnp.where(places < counts[:, None], token_ids, 0))
        after = cache.advance(counts)
        for index, layer in enumerate(self.layers):
            queries, keys, values = layer.project(hidden, rotaries[index])
            if are_guesses:
                hidden, keys, values = apart(hidden, keys, values)
            cache = cache.write(index, keys, values, counts)
            hidden = layer.finish(hidden, attend_cache(queries, cache, index, positions, after.lengths, self.config))
        return self._final(hidden), replace(cache, lengths=after.lengths)

    def _empty_cache(self, token_ids: Int[Array, "P S"], capacity: int, chunk_size: int) -> KVCache:
        num_rows, num_tokens = token_ids.shape
        if not num_tokens <= capacity <= self.max_length:
            raise ValueError(
                f"capacity must be in [{num_tokens}, {self.max_length}], from the columns of token_ids to max_length, "
                f"got {capacity}"
            )
        dtype = self.final_norm.dtype if self.config.compute_dtype is None else self.config.compute_dtype
        return KVCache.empty(num_rows, capacity, self.config, dtype, chunk_size)

    def _prefill_chunks(
        self, token_ids: Int[Array, "P S"], lengths: Int[Array, " P"], cache: KVCache, size: int
    ) -> KVCache:
        num_chunks = -(-token_ids.shape[1] // size)
        padded = jnp.pad(token_ids, ((0, 0), (0, num_chunks * size - token_ids.shape[1])))

        def read(chunk: Int[Array, ""], cache: KVCache) -> KVCache:
            tokens = jax.lax.dynamic_slice_in_dim(padded, chunk * size, size, axis=1)
            return self.extend(tokens, jnp.clip(lengths - chunk * size, 0, size), cache)[1]

        # As many chunks as the longest row has.
        return jax.lax.fori_loop(0, (lengths.max() + size - 1) // size, read, cache)

    def _start(
        self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"] | None
    ) -> tuple[Float[Array, "B T D"], list[Rotary | None]]:
        if not 1 <= token_ids.shape[1] <= self.max_length:
            raise ValueError(f"token_ids must have 1 to max_length={self.max_length} columns, got {token_ids.shape[1]}")
        places = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        if lengths is not None:
            token_ids = jnp.where(places < lengths[:, None], token_ids, 0)
        return self._embed(token_ids), rotary_tables(jnp.broadcast_to(places, token_ids.shape), self.config)

    def _weight(self, name: str) -> Array:
        return used(getattr(self, name)[...], name, self.config, self.rules)

    def _final(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return normed(hidden, self._weight("final_norm"), self.config)

    def _logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        logits = soft_cap(head_logits(hidden, self.head), self.config.logit_softcap)
        if self.rules is None:
            return logits
        return self.rules.constrain(logits, "batch", *(None,) * (logits.ndim - 2), "vocab")

    def _embed(self, token_ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        hidden = self._weight("embedding")[token_ids]
        if self.config.scale_embedding:
            # Rounded to the dtype first, as the weights were trained.
            hidden = hidden * jnp.asarray(self.config.width**0.5, hidden.dtype)
        return hidden if self.rules is None else self.rules.constrain(hidden, "batch")


def _forward(
    layer: Layer, hidden: Float[Array, "B T D"], rotary: Rotary | None, *, index: int
) -> tuple[Float[Array, "B T D"], Float[Array, "B T K Hd"], Float[Array, "B T K Hd"]]:
    config = layer.config
    queries, keys, values = layer.project(hidden, rotary)
    mixed = attend(queries, keys, values, config, index)
    return layer.finish(hidden, mixed), keys, values
