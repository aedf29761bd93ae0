"""One block of the decoder: its parameters, and the parts of its formula that do not depend on where keys come from."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.config import DecoderConfig
from models.layers import gated, linear, num_blocks, rms_norm, rotary_table, rotate, stored_rotary_table
from models.sharding import MeshRules

INIT_STD = 0.02  # GPT-2's, and the hub models' `initializer_range`

Rotary = tuple[Float[Array, "*B P"], Float[Array, "*B P"]]


class Layer(nnx.Module):
    """Parameters of one block, as the hub files store them: one row of a weight per output."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        """Random weights: normal(0.02), those that write to the residual stream / sqrt(2 num_layers); norms at 1.

        Adapters are float32 whatever the dtype: a bfloat16 one would not take small steps.
        """
        width, head_dim, mlp_width = config.width, config.head_dim, config.mlp_width
        query_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        residual_std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.config = config
        self.rules: MeshRules | None = None
        self.attention_norm = norm_weight(config, width, dtype)
        self.query = normal(rngs, (query_width, width), dtype)
        self.key = normal(rngs, (kv_width, width), dtype)
        self.value = normal(rngs, (kv_width, width), dtype)
        self.output = normal(rngs, (width, query_width), dtype, residual_std)
        self.mlp_norm = norm_weight(config, width, dtype)
        self.gate = normal(rngs, (mlp_width, width), dtype)
        self.up = normal(rngs, (mlp_width, width), dtype)
        self.down = normal(rngs, (width, mlp_width), dtype, residual_std)
        if config.attention_bias:
            self.query_bias = nnx.Param(jnp.zeros(query_width, dtype))
            self.key_bias = nnx.Param(jnp.zeros(kv_width, dtype))
            self.value_bias = nnx.Param(jnp.zeros(kv_width, dtype))
        if config.qk_norm:
            self.query_norm = norm_weight(config, head_dim, dtype)
            self.key_norm = norm_weight(config, head_dim, dtype)
        if config.post_norms:
            self.attention_post_norm = norm_weight(config, width, dtype)
            self.mlp_post_norm = norm_weight(config, width, dtype)
        if config.lora is not None:
            for name in config.lora.targets:
                down, up = new_adapter(rngs, getattr(self, name).shape, config.lora.rank)
                setattr(self, f"{name}_lora_a", down)
                setattr(self, f"{name}_lora_b", up)

    def weight(self, name: str) -> Array:
        """A parameter as it is used: in the dtype of computation, no longer cut along the width."""
        return used(getattr(self, name)[...], name, self.config, self.rules)

    def project(
        self, hidden: Float[Array, "*B D"], rotary: Rotary | None
    ) -> tuple[Float[Array, "*B H Hd"], Float[Array, "*B K Hd"], Float[Array, "*B K Hd"]]:
        """Rotated queries and keys, and values, of the residual stream."""
        x = self._norm(hidden, "attention_norm")
        queries, keys, values = (self._heads(x, name) for name in ("query", "key", "value"))
        if self.config.qk_norm:
            queries, keys = self._norm(queries, "query_norm"), self._norm(keys, "key_norm")
        if rotary is None:
            return queries, keys, values
        fixed_order = self.config.fixed_order
        return rotate(queries, *rotary, fixed_order), rotate(keys, *rotary, fixed_order), values

    def finish(self, hidden: Float[Array, "*B D"], mixed: Float[Array, "*B H Hd"]) -> Float[Array, "*B D"]:
        """The residual stream after adding the attention's output and then the MLP's."""
        added = self._linear(mixed.reshape(*mixed.shape[:-2], -1), "output")
        hidden = self._add(hidden, added, "attention_post_norm")
        x = self._norm(hidden, "mlp_norm")
        inner = gated(self._linear(x, "gate"), self._linear(x, "up"), self.config.activation)
        return self._add(hidden, self._linear(self._cut(inner, "mlp"), "down"), "mlp_post_norm")

    def _linear(self, x: Float[Array, "*B I"], name: str) -> Float[Array, "*B O"]:
        has_bias = self.config.attention_bias and name in ("query", "key", "value")
        weight = self.weight(name)
        # On a mesh, blocks would not lie as the outputs are cut; in a fixed order, few rows must round as many do.
        is_plain = self.rules is not None or self.config.fixed_order
        blocks = 1 if is_plain else num_blocks(math.prod(x.shape[:-1]), weight.shape[0])
        y = linear(x, weight, self.weight(f"{name}_bias") if has_bias else None, blocks)
        lora = self.config.lora
        if lora is None or name not in lora.targets:
            return y
        # Adapters may be float32 over a bfloat16 weight: added in their dtype, then rounded once.
        down, up = self.weight(f"{name}_lora_a"), self.weight(f"{name}_lora_b")
        added = lora.scale * linear(linear(x.astype(down.dtype), down), up)
        return (y.astype(up.dtype) + added).astype(y.dtype)

    def _heads(self, x: Float[Array, "*B D"], name: str) -> Float[Array, "*B N Hd"]:
        y = self._linear(x, name)
        heads = y.reshape(*y.shape[:-1], -1, self.config.head_dim)
        return self._cut(heads, "heads" if name == "query" else "kv_heads", None)

    def _norm(self, x: Float[Array, "*B N"], name: str) -> Float[Array, "*B N"]:
        return normed(x, self.weight(name), self.config)

    def _add(self, hidden: Float[Array, "*B D"], added: Float[Array, "*B D"], post_norm: str) -> Float[Array, "*B D"]:
        added = self._norm(added, post_norm) if self.config.post_norms else added
        return self._cut(hidden + added, None)

    def _cut(self, x: Array, *last_axes: str | None) -> Array:
        """x on its mesh: rows cut along the first axis, the last axes as named."""
        if self.rules is None:
            return x
        return self.rules.constrain(x, "batch", *(None,) * (x.ndim - 1 - len(last_axes)), *last_axes)


def rotary_tables(positions: Int[Array, "*B"], config: DecoderConfig) -> list[Rotary | None]:
    """Of each layer; layers with the same wavelengths share theirs."""
    kinds = [config.theta_of(index) for index in range(config.num_layers)]
    tables: dict = {None: None}
    for kind in dict.fromkeys(kind for kind in kinds if kind is not None):
        shape = (positions, config.head_dim, *kind)
        tables[kind] = stored_rotary_table(*shape, config.max_length) if config.fixed_order else rotary_table(*shape)
    return [tables[kind] for kind in kinds]


def used(weight: Array, name: str, config: DecoderConfig, rules: MeshRules | None) -> Array:
    """A parameter as it is used: in the dtype of computation, no longer cut along the width."""
    weight = weight if config.compute_dtype is None else weight.astype(config.compute_dtype)
    if rules is None:
        return weight
    return jax.lax.with_sharding_constraint(weight, rules.parameter(name, config, gathered=True))


def normed(x: Float[Array, "*B N"], scale: Float[Array, " N"], config: DecoderConfig) -> Float[Array, "*B N"]:
    """RMS norm with a decoder's epsilon, form and order of summation."""
    return rms_norm(x, scale, config.norm_eps, plus_one=config.norm_plus_one, fixed_order=config.fixed_order)


def norm_weight(config: DecoderConfig, size: int, dtype: DTypeLike) -> nnx.Param:
    """A norm that changes no size."""
    return nnx.Param(jnp.full(size, 0.0 if config.norm_plus_one else 1.0, dtype))


def normal(rngs: nnx.Rngs, shape: tuple[int, int], dtype: DTypeLike, std: float = INIT_STD) -> nnx.Param:
    """Normal draws; made in float32, so that every dtype gets the same ones, rounded."""
    return nnx.Param((std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype))


def new_adapter(rngs: nnx.Rngs, shape: tuple[int, ...], rank: int) -> tuple[nnx.Param, nnx.Param]:
    """A [r, I] and B [O, r] beside a weight [O, I], float32: A uniform in +-1 / sqrt(I), B zero, so that B A is zero.

    Source: PEFT's `init_lora_weights=True`: Kaiming's uniform draws with a = sqrt(5), whose bound is
      sqrt(6 / ((1 + a^2) I)).
    """
    num_outputs, num_inputs = shape
    bound = num_inputs**-0.5
    down = jax.random.uniform(rngs.params(), (rank, num_inputs), jnp.float32, -bound, bound)
    return nnx.Param(down), nnx.Param(jnp.zeros((num_outputs, rank), jnp.float32))
