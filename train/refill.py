"""Dynamic sampling: groups that teach something take the places of those that do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmask import Rollout
from train.advantages import has_equal_rewards
from train.config import GRPOConfig
from train.tasks.base import Rewards


@jax.jit
def refilled(
    rollout: Rollout, rewards: Rewards, more: Rollout, more_rewards: Rewards
) -> tuple[Rollout, Rewards, Int[Array, ""]]:
    """The rollout with its groups of equal rewards replaced, and how many of them are left.

    Their places are taken, in order, by the groups of `more` whose rewards differ; the others stay where they are.

    Args:
      rollout: with one support of `width` cells per token.
      rewards: of its completions.
      more: another one of the same shapes.
      more_rewards: of that.

    Source: DAPO, arXiv 2503.14476, section 3.2 (dynamic sampling).
    """
    is_flat = has_equal_rewards(jnp.asarray(rewards.values), rollout.group_size)
    is_useful = ~has_equal_rewards(jnp.asarray(more_rewards.values), more.group_size)
    place = jnp.cumsum(is_flat) - 1
    takes = is_flat & (place < is_useful.sum())
    # The useful groups first, each kind in its order.
    source = jnp.argsort(~is_useful, stable=True)[jnp.maximum(place, 0)]
    num_groups = is_flat.shape[0]

    def chosen(own: Any, other: Any) -> Array:
        groups, others = (leaf.reshape(num_groups, -1, *leaf.shape[1:]) for leaf in (own, other))
        is_taken = takes.reshape(-1, *(1,) * (groups.ndim - 1))
        return jnp.where(is_taken, others[source], groups).reshape(own.shape)

    merged, merged_rewards = jax.tree.map(chosen, (rollout, rewards), (more, more_rewards))
    return merged, merged_rewards, is_flat.sum() - takes.sum()


@jax.jit
def num_flat(rollout: Rollout, rewards: Rewards) -> Int[Array, ""]:
    """Groups of equal rewards."""
    return has_equal_rewards(jnp.asarray(rewards.values), rollout.group_size).sum()


def with_counts(details: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Both; counts, such as rewards that failed, add up, and means stay those of the first."""
    counts = {name: details.get(name, 0.0) + value for name, value in more.items() if name.startswith("rewards/num_")}
    return {**more, **details, **counts}


def refill_details(first: int, left: int, refills: int, config: GRPOConfig) -> dict[str, float]:
    """How much of the first rollout taught something, what it took to fill the batch, and how full that is."""
    return {
        "dynamic_sampling/useful_share": 1 - first / config.num_prompts,
        "dynamic_sampling/num_refills": float(refills),
        "dynamic_sampling/filled_share": 1 - left / config.num_prompts,
    }
