"""The filters: min-p, top-k, top-p, each a prefix of the canonical order.

A row's tokens are ordered by (edited logit descending, token id ascending). Every filter keeps a prefix of that order,
so what survives is described by one length, and every tie is settled by the order alone.

Here rows come as *columns*: some tokens of each row, already in canonical order, with -inf after the last finite one.
`bisection` does the same on whole rows without sorting them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_LOWEST = jnp.finfo(jnp.float32).min


def drawable(logits: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """float32 logits with -inf for whatever cannot be drawn: NaN, +inf and -inf."""
    logits = logits.astype(jnp.float32)
    return jnp.where(jnp.isfinite(logits), logits, -jnp.inf)


def effective_temperature(temperature: Float[Array, " B"]) -> Float[Array, " B"]:
    """The divisor of the logits: 1 in greedy rows, whose log-probabilities are not tempered (as in vLLM)."""
    return jnp.where(temperature > 0, temperature, 1.0)


def temper(
    logits: Float[Array, "B C"], row_max: Float[Array, " B"], temperature: Float[Array, " B"]
) -> Float[Array, "B C"]:
    """(x - max) / T, so the largest entry is 0; -inf stays -inf, finite entries stay finite.

    Args:
      logits: edited logits, finite or -inf.
      row_max: largest entry of each row.
      temperature: at least 0.01, or 0 for greedy rows.
    """
    divisor = effective_temperature(temperature)[:, None]
    is_finite = jnp.isfinite(logits)
    shifted = jnp.where(is_finite, logits, 0.0) - jnp.where(jnp.isfinite(row_max), row_max, 0.0)[:, None]
    # The clamp keeps a logit in its support when the difference of two huge logits overflows.
    return jnp.where(is_finite, jnp.maximum(shifted / divisor, _LOWEST), -jnp.inf)


def min_p_length(z: Float[Array, "B C"], min_p: Float[Array, " B"]) -> Int[Array, " B"]:
    """How many columns have z >= ln(min_p), that is, probability at least min_p times the largest."""
    is_kept = jnp.isfinite(z) & (z >= jnp.log(min_p)[:, None])
    return is_kept.sum(axis=1, dtype=jnp.int32)


def top_k_length(length: Int[Array, " B"], top_k: Int[Array, " B"]) -> Int[Array, " B"]:
    """Exactly the first k, where there are that many."""
    return jnp.minimum(length, top_k)


def top_p_length(z: Float[Array, "B C"], length: Int[Array, " B"], top_p: Float[Array, " B"]) -> Int[Array, " B"]:
    """The shortest prefix whose share of the mass of the first `length` columns reaches top_p; at least one column.

    Source: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
    """
    weights = jnp.where(is_prefix(z, length), jnp.exp(z), 0.0)
    mass_before = jnp.cumsum(weights, axis=1) - weights
    falls_short = mass_before < (top_p * weights.sum(axis=1))[:, None]
    # The first column stays whatever rounding does; the first failure ends the prefix.
    falls_short = falls_short.at[:, 0].set(True)
    nucleus = jnp.where(falls_short.all(axis=1), z.shape[1], jnp.argmin(falls_short, axis=1)).astype(jnp.int32)
    return jnp.where(top_p < 1, jnp.minimum(nucleus, length), length)


def kept_length(
    z: Float[Array, "B C"], min_p: Float[Array, " B"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Int[Array, " B"]:
    """How many columns survive min-p, then top-k, then top-p; each filter sees the survivors of the one before."""
    return top_p_length(z, top_k_length(min_p_length(z, min_p), top_k), top_p)


def is_prefix(z: Float[Array, "B C"], length: Int[Array, " B"]) -> Bool[Array, "B C"]:
    """Whether a column is among the first `length`."""
    return jnp.arange(z.shape[1], dtype=jnp.int32)[None, :] < length[:, None]
