"""The filters on whole rows, exact and without a sort: bisection on order-preserving keys.

For rows whose kept set may be anything: no top-k, a top-k beyond the candidates, or too many ties.
32 passes over the row find a key; ties at that key are taken in order of their ids.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import candidates, filters


def keep(
    logits: Float[Array, "B V"],
    z: Float[Array, "B V"],
    min_p: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
) -> Bool[Array, "B V"]:
    """Which tokens survive min-p, then top-k, then top-p.

    Args:
      logits: edited logits, finite or -inf: they give the order.
      z: the same after `filters.temper`: they give the mass.
      min_p: in [0, 1].
      top_k: at least 1.
      top_p: in (0, 1].
    """
    keys = candidates.order_keys(logits)
    is_token = jnp.isfinite(z)
    length = filters.top_k_length(filters.min_p_length(z, min_p), top_k)
    is_kept = jax.lax.cond(
        (length < is_token.sum(axis=1, dtype=jnp.int32)).any(),
        lambda: _first(keys, is_token, length),
        lambda: is_token,
    )
    return jax.lax.cond((top_p < 1).any(), lambda: _nucleus(keys, z, is_kept, top_p), lambda: is_kept)


def _first(keys: UInt[Array, "B V"], is_token: Bool[Array, "B V"], length: Int[Array, " B"]) -> Bool[Array, "B V"]:
    """The first `length` tokens of the canonical order."""

    def count(is_counted: Bool[Array, "B V"]) -> Int[Array, " B"]:
        return (is_counted & is_token).sum(axis=1, dtype=jnp.int32)

    key = _largest_key(lambda trial: count(keys >= trial) >= length, keys.shape[0])
    return is_token & _up_to(keys, is_token, key, length - count(keys > key[:, None]))


def _nucleus(
    keys: UInt[Array, "B V"], z: Float[Array, "B V"], is_kept: Bool[Array, "B V"], top_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The shortest prefix of the kept tokens whose share of their mass reaches top_p."""
    weights = jnp.where(is_kept, jnp.exp(z), 0.0)

    def mass(is_counted: Bool[Array, "B V"]) -> Float[Array, " B"]:
        return jnp.where(is_counted, weights, 0.0).sum(axis=1)

    # The largest weight is 1: a target above 0 is always first reached at a token, never before the first.
    target = jnp.maximum(top_p * weights.sum(axis=1), jnp.float32(1e-30))
    key = _largest_key(lambda trial: mass(keys >= trial) >= target, keys.shape[0])
    missing = target - mass(keys > key[:, None])
    tied = jnp.where(is_kept & (keys == key[:, None]), weights, 0.0).max(axis=1)
    num_tied = jnp.where(tied > 0, jnp.ceil(missing / jnp.where(tied > 0, tied, 1.0)), keys.shape[1])
    num_tied = jnp.clip(num_tied, 1, keys.shape[1]).astype(jnp.int32)
    nucleus = is_kept & _up_to(keys, is_kept, key, num_tied)
    return jnp.where((top_p < 1)[:, None], nucleus, is_kept)


def _up_to(
    keys: UInt[Array, "B V"], is_token: Bool[Array, "B V"], key: UInt[Array, " B"], num_tied: Int[Array, " B"]
) -> Bool[Array, "B V"]:
    """Tokens above the key, and the first `num_tied` of those at it, by id."""
    is_tied = is_token & (keys == key[:, None])
    rank = jnp.cumsum(is_tied, axis=1, dtype=jnp.int32)
    return (keys > key[:, None]) | (is_tied & (rank <= num_tied[:, None]))


def _largest_key(reaches: Callable[[UInt[Array, "B 1"]], Bool[Array, " B"]], num_rows: int) -> UInt[Array, " B"]:
    """The largest key that `reaches`, given that lower keys do whenever higher ones do, and that 0 does."""

    def set_bit(step: Array, key: UInt[Array, " B"]) -> UInt[Array, " B"]:
        trial = key | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        return jnp.where(reaches(trial[:, None]), trial, key)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(num_rows, jnp.uint32))
