"""Which attention a decoder runs: on whole sequences, and on a cache."""

import importlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.attention import (
    Scoring,
    Slots,
    causal_attention,
    causal_mask,
    ordered_attention,
    slot_attention,
    visible,
)
from models.cache import KVCache
from models.config import DecoderConfig


def attend(
    queries: Float[Array, "B T H Hd"],
    keys: Float[Array, "B T K Hd"],
    values: Float[Array, "B T K Hd"],
    config: DecoderConfig,
    layer: int,
) -> Float[Array, "B T H Hd"]:
    """Causal attention of whole sequences in one layer, as `config.attention` says.

    xla      scores written out, by blocks of queries
    cudnn    `jax.nn.dot_product_attention`: NVIDIA GPUs, 16-bit floats, no soft-cap
    tokamax  that package, where it is installed, with its own choice of kernel
    auto     cuDNN where the default device and the arrays allow it, else xla

    Raises:
      NotImplementedError: cuDNN was asked for and cannot do this.
      ModuleNotFoundError: tokamax was asked for and is not installed.
    """
    window, scoring = config.window_of(layer), scoring_of(config)
    if config.fixed_order:
        return ordered_attention(queries, keys, values, causal_mask(queries.shape[1], window), scoring)
    implementation = config.attention
    if implementation == "auto":
        implementation = "cudnn" if _is_for_cudnn(queries, scoring) else "xla"
    if implementation == "xla":
        return causal_attention(queries, keys, values, scoring, window)
    left = None if window is None else (window - 1, 0)
    if implementation == "tokamax":
        tokamax = importlib.import_module("tokamax")
        return tokamax.dot_product_attention(
            queries,
            keys,
            values,
            scale=scoring.scale,
            logits_soft_cap=scoring.softcap,
            is_causal=True,
            local_window_size=left,
        )
    if scoring.softcap is not None:
        raise NotImplementedError("attention='cudnn' has no soft-cap, and this decoder has one: use 'xla'")
    return jax.nn.dot_product_attention(
        queries,
        keys,
        values,
        scale=scoring.scale,
        is_causal=True,
        local_window_size=left,
        implementation="cudnn",
    )


def attend_cache(
    queries: Float[Array, "B C H Hd"],
    cache: KVCache,
    layer: int,
    positions: Int[Array, "B C"],
    lengths: Int[Array, " B"],
    config: DecoderConfig,
) -> Float[Array, "B C H Hd"]:
    """What the queries of a layer find in a cache in which their own keys and values are written already.

    Args:
      queries: of the newest tokens.
      cache: with them; its `lengths` are still those before.
      layer: which one.
      positions: of the queries.
      lengths: of the rows, the newest tokens included.
      config: of the decoder.
    """
    window, scoring = config.window_of(layer), scoring_of(config)
    keys, values = cache.keys[layer], cache.values[layer]
    is_seen = visible(positions, cache.positions(layer, lengths), window)
    if config.fixed_order:
        return ordered_attention(queries, keys.transpose(0, 3, 1, 2), values.swapaxes(1, 2), is_seen, scoring)
    parts = [Slots(keys, values, is_seen)]
    if cache.prompt is not None:
        is_seen = visible(positions, cache.prompt_positions(layer), window)
        parts.append(Slots(cache.prompt.keys[layer], cache.prompt.values[layer], is_seen))
    return slot_attention(queries, parts, scoring)


def scoring_of(config: DecoderConfig) -> Scoring:
    """How a decoder's scores come from queries and keys."""
    return Scoring(config.score_scale, config.attention_softcap)


def _is_for_cudnn(queries: Float[Array, "B T H Hd"], scoring: Scoring) -> bool:
    """Whether the default device is a GPU on which cuDNN has a kernel for these arrays."""
    # cuDNN's flash attention: 16-bit floats; heads of at most 128 on every card that has it.
    fits = queries.dtype in (jnp.bfloat16, jnp.float16) and queries.shape[-1] % 8 == 0 and queries.shape[-1] <= 128
    return fits and scoring.softcap is None and jax.default_backend() == "gpu"
