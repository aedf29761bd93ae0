"""What a policy says about a token, from the logits of the ids that the token is scored on.

One arithmetic for the few kept columns of a support, for whole rows of the vocabulary, and for the slices of them that
devices hold.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmask import filters, shards

# exp of anything below is 0 in float32 (the smallest subnormal is exp(-103.3)).
WEIGHTLESS = -200.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """What a policy says about sampled tokens.

    Attributes:
      logprobs: of each token; -inf where it lies outside its support.
      entropy: of the distribution the token is scored on, in nats.
      id_logprobs: of each id in the compact cells, -inf in cells without one; None where not asked for. The lowest W
        ids of a wider support are there, normalised over all of it.
      kl: KL(policy || reference) over the ids the token is scored on, in nats; None without a reference.
      ref_logprobs: of each token under the reference, on the same ids; None without a reference.
    """

    logprobs: Float[Array, "*B"]
    entropy: Float[Array, "*B"]
    id_logprobs: Float[Array, "*B W"] | None = None
    kl: Float[Array, "*B"] | None = None
    ref_logprobs: Float[Array, "*B"] | None = None


class RowScores(NamedTuple):
    """One number per row: see `Scores`; `top` is the largest logit, and `log_mass` = log sum exp((x - top) / T)."""

    logprobs: Float[Array, "*B"]
    entropy: Float[Array, "*B"]
    top: Float[Array, "*B"]
    log_mass: Float[Array, "*B"]
    kl: Float[Array, "*B"] | None
    ref_logprobs: Float[Array, "*B"] | None


def of_columns(
    logits: Float[Array, "*B C"],
    kept: Bool[Array, "*#B C"],
    is_token: Bool[Array, "*#B C"],
    temperature: Float[Array, "*#B"],
    ref_logits: Float[Array, "*B C"] | None = None,
    part: shards.Slice | None = None,
) -> RowScores:
    """Scores over the kept columns; the others are replaced before any arithmetic, so NaN there is harmless.

    A kept logit of -inf is an id that edits took away. One that is NaN or +inf makes its row's scores NaN.

    Args:
      logits: edited, before the temperature.
      kept: columns that the tokens are scored on.
      is_token: the column of each row's token.
      temperature: of each row; 0 tempers nothing.
      ref_logits: those of a reference policy.
      part: the columns that this device holds; None where it holds all of them.
    """
    part = shards.Slice(logits.shape[-1]) if part is None else part
    kept = kept & (logits != -jnp.inf)
    factor = filters.inverse_temperature(temperature)
    is_found = kept & is_token
    has_token = part.total(is_found.any(axis=-1).astype(jnp.int32)) > 0
    z, weights, top, mass = _normalised(logits, kept, factor, part)
    log_mass = jnp.log(mass)

    def of_token(z: Array, log_mass: Array) -> Array:
        value = part.total(jnp.where(is_found, z, 0.0).sum(axis=-1)) - log_mass
        return jnp.where(has_token, value, -jnp.inf)

    # H = log mass - sum_v p_v z_v; without the bound, 0 x z overflows in the derivative of the product.
    entropy = log_mass - part.total((weights * jnp.maximum(z, WEIGHTLESS)).sum(axis=-1)) / mass
    kl = ref_logprobs = None
    if ref_logits is not None:
        ref_z, _, _, ref_mass = _normalised(ref_logits, kept, factor, part)
        ref_log_mass = jnp.log(ref_mass)
        # KL = sum_v p_v (z_v - z'_v) - (log mass - log mass')
        differences = jnp.where(z > WEIGHTLESS, z - ref_z, 0.0)
        kl = part.total((weights * differences).sum(axis=-1)) / mass - (log_mass - ref_log_mass)
        ref_logprobs = of_token(ref_z, ref_log_mass)
    return RowScores(of_token(z, log_mass), entropy, top, log_mass, kl, ref_logprobs)


def of_ids(
    logits: Float[Array, "*B W"], kept: Bool[Array, "*B W"], temperature: Float[Array, "*#B"], rows: RowScores
) -> Float[Array, "*B W"]:
    """Log-probability of each kept column, by the normaliser of its row; -inf in the others."""
    kept = kept & (logits != -jnp.inf)
    z = _tempered(jnp.where(kept, logits, 0.0), rows.top, filters.inverse_temperature(temperature))
    return jnp.where(kept, z - rows.log_mass[..., None], -jnp.inf)


def _normalised(
    logits: Float[Array, "*B C"], kept: Bool[Array, "*#B C"], factor: Float[Array, "*#B"], part: shards.Slice
) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"], Float[Array, "*B"], Float[Array, "*B"]]:
    """(x - top) / T, its exponential, 0 in columns not kept; top; the sum of the exponentials, 1 of nothing."""
    x = jnp.where(kept, logits, 0.0).astype(jnp.float32)
    top = part.largest(jax.lax.stop_gradient(jnp.where(kept, x, -jnp.inf).max(axis=-1)))
    z = jnp.where(kept, _tempered(x, top, factor), 0.0)
    weights = jnp.where(kept, jnp.exp(z), 0.0)
    mass = part.total(weights.sum(axis=-1))
    # Compared so that NaN stays.
    return z, weights, top, jnp.where(mass == 0, 1.0, mass)


def _tempered(x: Float[Array, "*B C"], top: Float[Array, "*B"], factor: Float[Array, "*#B"]) -> Float[Array, "*B C"]:
    """(x - top) / T as in the sampler: the maximum leaves first, so the likeliest token is at exactly 0. NaN stays."""
    top = jnp.where(top == -jnp.inf, 0.0, top)
    return jnp.maximum((x - top[..., None]) * factor[..., None], filters.LOWEST)
