"""The filters: min-p, top-k, top-p, each a prefix of the canonical order.

A row's tokens are ordered by (edited logit descending, token id ascending). Every filter keeps a prefix of that order,
so what survives is described by one length, and every tie is settled by the order alone.

Here rows come as *columns*: some tokens of each row, already in canonical order, with -inf after the last finite one.
`bisection` does the same on whole rows without sorting them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask.mass import Mass

# What stands for differences of two huge logits, which overflow.
LOWEST = jnp.finfo(jnp.float32).min


def drawable(logits: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """float32 logits with -inf for whatever cannot be drawn: NaN, +inf and -inf."""
    logits = logits.astype(jnp.float32)
    return jnp.where(jnp.isfinite(logits), logits, -jnp.inf)


def inverse_temperature(temperature: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """1 / T, the factor of the logits; 1 in greedy rows, whose log-probabilities are not tempered (as in vLLM).

    Written out because XLA divides by a T that is shared by a row in this way, and by a T of its own in the other:
    the last bits of z would depend on the shape of the program.
    """
    return 1 / jnp.where(temperature > 0, temperature, 1.0)


def temper(
    logits: Float[Array, "B C"], row_max: Float[Array, " B"], temperature: Float[Array, " B"]
) -> Float[Array, "B C"]:
    """(x - max) / T, so the largest entry is 0; -inf stays -inf, finite entries stay finite.

    Args:
      logits: edited logits, finite or -inf.
      row_max: largest entry of each row.
      temperature: at least 0.01, or 0 for greedy rows.
    """
    row_max = jnp.where(jnp.isfinite(row_max), row_max, 0.0)
    return tempered(logits, row_max[:, None], inverse_temperature(temperature)[:, None])


def tempered(
    logits: Float[Array, "*#C"], row_max: Float[Array, "*#C"], factor: Float[Array, "*#C"]
) -> Float[Array, "*#C"]:
    """(x - max) factor, elementwise; the row maximum is finite."""
    is_finite = jnp.isfinite(logits)
    shifted = jnp.where(is_finite, logits, 0.0) - row_max
    # The clamp keeps a logit in its support when the difference of two huge logits overflows.
    return jnp.where(is_finite, jnp.maximum(shifted * factor, LOWEST), -jnp.inf)


def survives_min_p(z: Float[Array, "B C"], min_p: Float[Array, " B"]) -> Bool[Array, "B C"]:
    """Which columns have z >= ln(min_p), that is, probability at least min_p times the largest."""
    return reaches(z, jnp.log(min_p)[:, None])


def reaches(z: Float[Array, "*#C"], least: Float[Array, "*#C"]) -> Bool[Array, "*#C"]:
    """z >= least, elementwise, of entries that are tokens."""
    return jnp.isfinite(z) & (z >= least)


def min_p_length(z: Float[Array, "B C"], min_p: Float[Array, " B"]) -> Int[Array, " B"]:
    """How many columns survive min-p."""
    return survives_min_p(z, min_p).sum(axis=1, dtype=jnp.int32)


def top_k_length(length: Int[Array, " B"], top_k: Int[Array, " B"]) -> Int[Array, " B"]:
    """Exactly the first k, where there are that many."""
    return jnp.minimum(length, top_k)


def top_p_length(running: Mass, total: Mass, top_p: Float[Array, " B"]) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """The shortest prefix whose share of the total reaches top_p, at least one column, and whether any prefix does.

    Args:
      running: mass [B, C] of each row up to each column.
      total: mass [B] of all that survived the filters before, in these columns or not.
      top_p: in (0, 1).

    Source: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
    """
    target = total.share(top_p)
    is_enough = running.reaches(target[:, None])
    is_reached = is_enough.any(axis=1)
    length = jnp.argmax(is_enough, axis=1).astype(jnp.int32) + 1
    return jnp.where(is_reached, length, is_enough.shape[1]), is_reached


def is_prefix(z: Float[Array, "B C"], length: Int[Array, " B"]) -> Bool[Array, "B C"]:
    """Whether a column is among the first `length`."""
    return jnp.arange(z.shape[1], dtype=jnp.int32)[None, :] < length[:, None]


def prefix(z: Float[Array, "B C"], length: Int[Array, " B"]) -> Float[Array, "B C"]:
    """z of the first `length` columns, -inf in the others."""
    return jnp.where(is_prefix(z, length), z, -jnp.inf)
