"""Weights for tokens that another policy sampled: an older one, or the same weights in another program.

All are constants: no gradient runs through them. They multiply the policy term of a token and leave the denominator of
the loss alone, as importance weights do; it is known before they are. A completion that must leave both sides (cut
off, say) leaves the loss mask instead.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from train.losses import MAX_LOG_RATIO, sequence_mean

SEQUENCE_RATIOS = ("geometric-mean", "max")


def truncated_importance_weights(
    logprobs: Float[Array, "B T"],
    behaviour_logprobs: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    cap: float,
) -> Float[Array, "B T"]:
    """min(pi / pi_behaviour, cap) of each token, without a gradient; 1 outside the loss mask.

    Args:
      logprobs: under the policy before the first update on the rollout, whose ratio to the trained policy is clipped
        by the loss.
      behaviour_logprobs: of the same tokens when they were sampled.
      loss_mask: which cells were sampled.
      cap: the largest weight, C; > 0, and 1 or more so that tokens of the policy itself keep weight 1.

    Raises:
      ValueError: cap is not above 0.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
      fengyao.notion.site/off-policy-rl; truncation as in Ionides 2008.
    """
    if not cap > 0:
        raise ValueError(f"cap must be > 0, got {cap}.")
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, loss_mask)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)), cap))


def sequence_mask(
    logprobs: Float[Array, "B T"],
    behaviour_logprobs: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    low: float = 0.0,
    high: float = math.inf,
    ratio: str = "geometric-mean",
    advantages: Float[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """1 for each sequence whose ratio pi / pi_behaviour lies in [low, high], 0 for the others; no gradient.

    geometric-mean: (pi(o) / pi_behaviour(o))^(1/|o|)        max: the ratio of each of its tokens, all of which must fit

    DeepSeek-V3.2 drops completions with a negative advantage whose mean of log(pi_behaviour / pi) exceeds delta: low =
    exp(-delta), the geometric mean, and `advantages`.

    Args:
      logprobs: under the policy being trained.
      behaviour_logprobs: of the same tokens when they were sampled.
      loss_mask: which cells were sampled. A sequence without one is kept.
      low: in [0, 1].
      high: at least 1.
      ratio: "geometric-mean" or "max".
      advantages: one per sequence, where only those below 0 may be dropped; None: all may be.

    Raises:
      ValueError: no such ratio, or the band leaves 1 out.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1, off-policy sequence masking.
    """
    if ratio not in SEQUENCE_RATIOS:
        raise ValueError(f"ratio must be one of {', '.join(SEQUENCE_RATIOS)}, got {ratio!r}.")
    if not (0 <= low <= 1 <= high):
        raise ValueError(f"low must be in [0, 1] and high at least 1, got {low} and {high}.")
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, loss_mask)
    log_low, log_high = (math.log(low) if low > 0 else -math.inf), math.log(high)
    if ratio == "max":
        fits = ((log_ratio >= log_low) & (log_ratio <= log_high)).all(axis=1)
    else:
        mean = sequence_mean(log_ratio, loss_mask)
        fits = (mean >= log_low) & (mean <= log_high)
    if advantages is not None:
        fits |= advantages >= 0
    return fits.astype(jnp.float32)


def _log_ratio(
    logprobs: Float[Array, "B T"], behaviour_logprobs: Float[Array, "B T"], loss_mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    return jnp.where(loss_mask, logprobs, 0.0) - jnp.where(loss_mask, behaviour_logprobs, 0.0)
