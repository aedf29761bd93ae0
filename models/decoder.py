"""A decoder-only transformer: teacher forcing for learners, prefill and decode for samplers.

The module is its own parameter pytree: every leaf is a float array, so it goes straight into jit, grad and Optax.
Nothing here knows about tokens' text, sampling or devices.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from models.cache import KVCache
from models.config import DecoderConfig
from models.layers import (
    attention,
    head_logits,
    linear,
    ordered_attention,
    rms_norm,
    rotary_table,
    rotate,
    stored_rotary_table,
    swiglu,
    token_attention,
)

INIT_STD = 0.02  # GPT-2's, and the hub models' `initializer_range`

Rotary = tuple[Float[Array, "*B P"], Float[Array, "*B P"]]


class Layer(nnx.Module):
    """Parameters of one block, and the parts of its formula that do not depend on where keys come from."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        """Random weights: normal(0.02), those that write to the residual stream / sqrt(2 num_layers); norms at 1."""
        width, head_dim, mlp_width = config.width, config.head_dim, config.mlp_width
        query_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        residual_std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.config = config
        self.attention_norm = _ones(width, dtype)
        self.query = _normal(rngs, (query_width, width), dtype)
        self.key = _normal(rngs, (kv_width, width), dtype)
        self.value = _normal(rngs, (kv_width, width), dtype)
        self.output = _normal(rngs, (width, query_width), dtype, residual_std)
        self.mlp_norm = _ones(width, dtype)
        self.gate = _normal(rngs, (mlp_width, width), dtype)
        self.up = _normal(rngs, (mlp_width, width), dtype)
        self.down = _normal(rngs, (width, mlp_width), dtype, residual_std)
        if config.attention_bias:
            self.query_bias = nnx.Param(jnp.zeros(query_width, dtype))
            self.key_bias = nnx.Param(jnp.zeros(kv_width, dtype))
            self.value_bias = nnx.Param(jnp.zeros(kv_width, dtype))
        if config.qk_norm:
            self.query_norm = _ones(head_dim, dtype)
            self.key_norm = _ones(head_dim, dtype)

    def norm(self, x: Float[Array, "*B N"], scale: nnx.Param) -> Float[Array, "*B N"]:
        """RMS norm with this decoder's epsilon and order of summation."""
        return rms_norm(x, scale[...], self.config.norm_eps, self.config.fixed_order)

    def project(
        self, hidden: Float[Array, "*B D"], rotary: Rotary
    ) -> tuple[Float[Array, "*B H Hd"], Float[Array, "*B K Hd"], Float[Array, "*B K Hd"]]:
        """Rotated queries and keys, and values, of the normalised residual stream."""
        x = self.norm(hidden, self.attention_norm)
        bias = self.config.attention_bias
        queries = _heads(linear(x, self.query[...], self.query_bias[...] if bias else None), self.config.head_dim)
        keys = _heads(linear(x, self.key[...], self.key_bias[...] if bias else None), self.config.head_dim)
        values = _heads(linear(x, self.value[...], self.value_bias[...] if bias else None), self.config.head_dim)
        if self.config.qk_norm:
            queries = self.norm(queries, self.query_norm)
            keys = self.norm(keys, self.key_norm)
        fixed_order = self.config.fixed_order
        return rotate(queries, *rotary, fixed_order), rotate(keys, *rotary, fixed_order), values

    def finish(self, hidden: Float[Array, "*B D"], mixed: Float[Array, "*B H Hd"]) -> Float[Array, "*B D"]:
        """The residual stream after adding the attention's output and then the MLP's."""
        hidden = hidden + linear(mixed.reshape(*mixed.shape[:-2], -1), self.output[...])
        x = self.norm(hidden, self.mlp_norm)
        return hidden + swiglu(x, self.gate[...], self.up[...], self.down[...])


class Decoder(nnx.Module):
    """A causal language model over full attention; see `DecoderConfig` for the families it covers."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        """Random weights for training from scratch; all computation happens in the weights' dtype."""
        self.config = config
        self.embedding = _normal(rngs, (config.vocab_size, config.width), dtype)
        self.layers = nnx.List([Layer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.final_norm = _ones(config.width, dtype)
        if not config.tie_embeddings:
            self.lm_head = _normal(rngs, (config.vocab_size, config.width), dtype)

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
        """One row per token; hidden . head[v] is token v's logit."""
        return self.embedding[...] if self.config.tie_embeddings else self.lm_head[...]

    def hidden(self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        """Final hidden states after the last norm, under teacher forcing.

        Args:
          token_ids: right-padded rows, each starting at position 0.
          lengths: tokens of each row, in [0, T]; cells past them are read as token 0, so that no junk there reaches
            any number. Without lengths every cell is read; causality keeps later cells out of earlier ones.
        """
        hidden, rotary, visible_mask = self._start(token_ids, lengths)
        for layer in self.layers:
            run = jax.checkpoint(_forward) if self.config.remat else _forward
            hidden, _, _ = run(layer, hidden, rotary, visible_mask)
        return self._final(hidden)

    def logits(self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T V"]:
        """float32 logits of the token after each cell; arguments as in `hidden`."""
        return head_logits(self.hidden(token_ids, lengths), self.head)

    def prefill(self, token_ids: Int[Array, "P S"], lengths: Int[Array, " P"], *, capacity: int) -> KVCache:
        """A cache that holds the first lengths[p] tokens of each right-padded row; no logits are computed.

        Args:
          token_ids: prompts; cells past a row's length are never read.
          lengths: tokens to hold, in [0, S].
          capacity: slots per row, >= S.
        Raises:
          ValueError: capacity < S.
        """
        if capacity < token_ids.shape[1]:
            raise ValueError(f"capacity must be >= the {token_ids.shape[1]} columns of token_ids, got {capacity}")
        hidden, rotary, visible_mask = self._start(token_ids, lengths)
        keys, values = [], []
        for layer in self.layers:
            hidden, layer_keys, layer_values = _forward(layer, hidden, rotary, visible_mask)
            keys.append(_pad_slots(layer_keys, capacity))
            values.append(_pad_slots(layer_values, capacity))
        return KVCache(tuple(keys), tuple(values), lengths.astype(jnp.int32))

    def decode(self, token_ids: Int[Array, " B"], cache: KVCache) -> tuple[Float[Array, "B V"], KVCache]:
        """float32 logits after one more token per row, and the cache that holds it.

        A row whose cache is full is left as it is; its logits mean nothing.

        Args:
          token_ids: the token at position cache.lengths[b] of row b.
          cache: the tokens before it.
        """
        rotary = self._rotary(cache.lengths)
        visible_mask = jnp.arange(cache.capacity)[None] <= cache.lengths[:, None]
        hidden = self._embed(token_ids)
        for index, layer in enumerate(self.layers):
            queries, keys, values = layer.project(hidden, rotary)
            cache = cache.write(index, keys, values)
            if self.config.fixed_order:
                row = (queries[:, None], cache.keys[index], cache.values[index], visible_mask[:, None])
                mixed = ordered_attention(*row)[:, 0]
            else:
                mixed = token_attention(queries, cache.keys[index], cache.values[index], visible_mask)
            hidden = layer.finish(hidden, mixed)
        hidden = self._final(hidden)
        return head_logits(hidden, self.head), cache.advance()

    def _start(
        self, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"] | None
    ) -> tuple[Float[Array, "B T D"], Rotary, Bool[Array, "B T T"]]:
        token_ids = _blank_padding(token_ids, lengths)
        num_rows, num_tokens = token_ids.shape
        positions = jnp.broadcast_to(jnp.arange(num_tokens), token_ids.shape)
        causal_mask = jnp.broadcast_to(jnp.tri(num_tokens, dtype=bool), (num_rows, num_tokens, num_tokens))
        return self._embed(token_ids), self._rotary(positions), causal_mask

    def _final(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return rms_norm(hidden, self.final_norm[...], self.config.norm_eps, self.config.fixed_order)

    def _embed(self, token_ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        return self.embedding[...][token_ids]

    def _rotary(self, positions: Int[Array, "*B"]) -> Rotary:
        config = self.config
        shape = (positions, config.head_dim, config.rope_theta, config.rope_scaling)
        return stored_rotary_table(*shape, config.max_length) if config.fixed_order else rotary_table(*shape)


def _forward(
    layer: Layer, hidden: Float[Array, "B T D"], rotary: Rotary, visible_mask: Bool[Array, "B T T"]
) -> tuple[Float[Array, "B T D"], Float[Array, "B T K Hd"], Float[Array, "B T K Hd"]]:
    queries, keys, values = layer.project(hidden, rotary)
    attend = ordered_attention if layer.config.fixed_order else attention
    return layer.finish(hidden, attend(queries, keys, values, visible_mask)), keys, values


def _blank_padding(token_ids: Int[Array, "B T"], lengths: Int[Array, " B"] | None) -> Int[Array, "B T"]:
    if lengths is None:
        return token_ids
    is_token = jnp.arange(token_ids.shape[1])[None] < lengths[:, None]
    return jnp.where(is_token, token_ids, 0)


def _heads(x: Float[Array, "*B W"], head_dim: int) -> Float[Array, "*B N Hd"]:
    return x.reshape(*x.shape[:-1], -1, head_dim)


def _pad_slots(x: Float[Array, "B T K Hd"], capacity: int) -> Float[Array, "B S K Hd"]:
    return jnp.pad(x, ((0, 0), (0, capacity - x.shape[1]), (0, 0), (0, 0)))


def _ones(size: int, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jnp.ones(size, dtype))


def _normal(rngs: nnx.Rngs, shape: tuple[int, int], dtype: DTypeLike, std: float = INIT_STD) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype))
