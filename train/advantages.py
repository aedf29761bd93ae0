"""How much better each completion did than its group; and rewards reshaped before that.

Rewards come one per completion, the rows of a group side by side. A group of equal rewards gives exactly 0 in every
formula: equality is compared, not measured, since the mean of equal numbers can be off by an ulp, and an ulp divided by
itself is an advantage made of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def group_advantages(
    rewards: Float[Array, " B"], group_size: int, *, ddof: int = 1, epsilon: float = 1e-6
) -> Float[Array, " B"]:
    """(r - group mean) / (group standard deviation + epsilon); exactly 0 where all rewards of a group are equal.

    The deviation is taken in two passes: E[r^2] - E[r]^2 leaves a residue of rounding that, divided by itself, makes
    advantages out of nothing.

    Args:
      rewards: the rows of a group lie side by side.
      group_size: rows per group, G; divides B.
      ddof: the variance divides by G - ddof. The paper says "std" and no more; 1 is what its followers' trainers use.
      epsilon: added to the deviation.

    Raises:
      ValueError: group_size does not divide the rows, or is not above ddof.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    _check_groups(rewards, group_size, ddof)
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    deviation = jnp.sqrt((centred**2).sum(axis=1, keepdims=True) / (group_size - ddof))
    return jnp.where(_is_flat(groups), 0.0, centred / (deviation + epsilon)).reshape(-1)


def dr_grpo_advantages(rewards: Float[Array, " B"], group_size: int) -> Float[Array, " B"]:
    """r - group mean, unscaled: groups of nearly equal rewards are not blown up to the size of the others.

    Args:
      rewards: the rows of a group lie side by side.
      group_size: rows per group, G >= 2; divides B.

    Raises:
      ValueError: group_size does not divide the rows, or is below 2.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    _check_groups(rewards, group_size, 1)
    groups = rewards.reshape(-1, group_size)
    return jnp.where(_is_flat(groups), 0.0, groups - groups.mean(axis=1, keepdims=True)).reshape(-1)


def rloo_advantages(rewards: Float[Array, " B"], group_size: int) -> Float[Array, " B"]:
    """r - mean of the other rewards of its group = G / (G - 1) (r - group mean), unscaled.

    Args:
      rewards: the rows of a group lie side by side.
      group_size: rows per group, G >= 2; divides B.

    Raises:
      ValueError: group_size does not divide the rows, or is below 2.

    Source: REINFORCE leave-one-out, Ahmadian et al., arXiv 2402.14740, section 3.3; Kool et al. 2019.
    """
    return dr_grpo_advantages(rewards, group_size) * (group_size / (group_size - 1))


def reinforce_pp_advantages(
    rewards: Float[Array, " B"], group_size: int, *, ddof: int = 1, epsilon: float = 1e-6
) -> Float[Array, " B"]:
    """(r - group mean) / (standard deviation of r - group mean over the whole batch + epsilon).

    The variant with a baseline ("REINFORCE++ w/ Baseline"). The paper also subtracts the batch mean of r - group mean;
    it is 0, every group having mean 0, so it is not subtracted here, and flat groups stay exactly 0. Statistics are
    over completions; trainers that take them over tokens weight long completions more.

    Args:
      rewards: those of the whole batch; the rows of a group lie side by side.
      group_size: rows per group, G >= 2; divides B.
      ddof: the variance divides by B - ddof.
      epsilon: added to the deviation.

    Raises:
      ValueError: group_size does not divide the rows, or is below 2.

    Source: REINFORCE++, arXiv 2501.03262v9, the variant with a baseline. Its other variant (one completion per prompt,
      batch mean and deviation of the rewards themselves) compares prompts with one another, and is not offered.
    """
    centred = dr_grpo_advantages(rewards, group_size)
    deviation = jnp.sqrt((centred**2).sum() / (rewards.shape[0] - ddof))
    return centred / (deviation + epsilon)


# The one place where `GRPOConfig.advantages` meets the functions.
ADVANTAGES: Mapping[str, Callable[[Float[Array, " B"], int], Float[Array, " B"]]] = MappingProxyType(
    {
        "grpo": group_advantages,
        "dr-grpo": dr_grpo_advantages,
        "rloo": rloo_advantages,
        "reinforce++-baseline": reinforce_pp_advantages,
    }
)


def soft_overlong_punishment(lengths: Int[Array, " B"], *, max_length: int, buffer: int) -> Float[Array, " B"]:
    """What is added to a completion's reward for its length: 0 up to max_length - buffer, then down to -1 on a line.

    (max_length - buffer - length) / buffer, kept within [-1, 0]

    Args:
      lengths: tokens per completion.
      max_length: from this length on the punishment is -1.
      buffer: tokens over which it grows, in [1, max_length].

    Raises:
      ValueError: buffer out of its range.

    Source: DAPO, arXiv 2503.14476, equation 13 (L_max and L_cache).
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be in [1, max_length={max_length}], got {buffer}.")
    over = (max_length - buffer - lengths).astype(jnp.float32)
    return jnp.clip(over / buffer, -1.0, 0.0)


def _check_groups(rewards: Float[Array, " B"], group_size: int, ddof: int) -> None:
    if group_size <= ddof or rewards.shape[0] % group_size:
        raise ValueError(
            f"group_size must divide the {rewards.shape[0]} rewards and exceed ddof={ddof}, got {group_size}."
        )


def has_equal_rewards(rewards: Float[Array, " B"], group_size: int) -> Bool[Array, " P"]:
    """Which groups have rewards that are all the same, and so no advantage.

    Args:
      rewards: the rows of a group lie side by side.
      group_size: rows per group, G; divides B.
    """
    return _is_flat(rewards.reshape(-1, group_size))[:, 0]


def _is_flat(groups: Float[Array, "P G"]) -> Array:
    return groups.max(axis=1, keepdims=True) == groups.min(axis=1, keepdims=True)
