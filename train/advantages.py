"""How much better each completion did than its group."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def group_advantages(
    rewards: Float[Array, " B"], group_size: int, *, ddof: int = 1, epsilon: float = 1e-6
) -> Float[Array, " B"]:
    """(r - group mean) / (group standard deviation + epsilon); exactly 0 where all rewards of a group are equal.

    The deviation is taken in two passes: E[r^2] - E[r]^2 leaves a residue of rounding that, divided by itself, makes
    advantages out of nothing.

    Args:
      rewards: the rows of a group lie side by side.
      group_size: rows per group, G; divides B.
      ddof: the variance divides by G - ddof.
      epsilon: added to the deviation.

    Raises:
      ValueError: group_size does not divide the rows, or is not above ddof.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    if group_size <= ddof or rewards.shape[0] % group_size:
        raise ValueError(
            f"group_size must divide the {rewards.shape[0]} rewards and exceed ddof={ddof}, got {group_size}."
        )
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    deviation = jnp.sqrt((centred**2).sum(axis=1, keepdims=True) / (group_size - ddof))
    # Compared, not measured: the mean of equal numbers can be off by an ulp.
    is_flat = groups.max(axis=1, keepdims=True) == groups.min(axis=1, keepdims=True)
    return jnp.where(is_flat, 0.0, centred / (deviation + epsilon)).reshape(-1)
