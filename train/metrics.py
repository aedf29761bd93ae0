"""What a run reports of each iteration."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmask import Rollout
from train.tasks.base import Rewards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Scalars of one iteration, float32.

    Attributes:
      reward: mean over completions.
      exact: share of completions that are fully right.
      support_size: mean ids per sampled token.
      one_id_share: share of tokens whose support held one id: no choice, log-probability 0, no gradient.
      completion_length: mean tokens per completion.
      num_tokens: tokens of the loss mask.
      max_ratio_error: largest |ratio - 1| on the first pass, where policy and behaviour have the same weights.
      ratio_mean: on the first pass.
      ratio_std: on the first pass.
      entropy: mean over tokens of the entropy of the scored distribution, in nats.
      clip_fraction: share of tokens whose gradient the clip removed, over all passes.
      grad_norm: global norm of the gradient of the first pass, before it is clipped.
      loss: of the first pass, aggregated as the config says.
      kl: mean KL from the reference policy over tokens, on the first pass, in nats; None where the loss has none.
      staleness: mean iterations between the policy that sampled a token and the one that learned from it; None where
        the rollout does not say.
    """

    reward: Float[Array | np.ndarray, ""]
    exact: Float[Array | np.ndarray, ""]
    support_size: Float[Array | np.ndarray, ""]
    one_id_share: Float[Array | np.ndarray, ""]
    completion_length: Float[Array | np.ndarray, ""]
    num_tokens: Float[Array | np.ndarray, ""]
    max_ratio_error: Float[Array | np.ndarray, ""]
    ratio_mean: Float[Array | np.ndarray, ""]
    ratio_std: Float[Array | np.ndarray, ""]
    entropy: Float[Array | np.ndarray, ""]
    clip_fraction: Float[Array | np.ndarray, ""]
    grad_norm: Float[Array | np.ndarray, ""]
    loss: Float[Array | np.ndarray, ""]
    kl: Float[Array | np.ndarray, ""] | None = None
    staleness: Float[Array | np.ndarray, ""] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pass:
    """What one pass over the rows saw; M: passes, once they are stacked.

    Attributes:
      loss: aggregated over all rows.
      clip_fraction: share of tokens whose gradient the clip removed.
      ratio: pi / pi_behaviour of each token.
      entropy: of the distribution each token is scored on, in nats.
      kl: KL(policy || reference) of each token, in nats; None where the loss has none.
    """

    loss: Float[Array, "*M"]
    clip_fraction: Float[Array, "*M"]
    ratio: Float[Array, "*M B T"]
    entropy: Float[Array, "*M B T"]
    kl: Float[Array, "*M B T"] | None = None


# Names users know from other trainers, for files and displays. Metrics that are None have no line.
NAMES = {
    "reward": "rewards/mean",
    "exact": "rewards/exact",
    "support_size": "support/size_mean",
    "one_id_share": "support/one_id_share",
    "completion_length": "completions/mean_length",
    "num_tokens": "completions/num_tokens",
    "max_ratio_error": "ratio/max_error",
    "ratio_mean": "ratio/mean",
    "ratio_std": "ratio/std",
    "entropy": "entropy",
    "clip_fraction": "clip_fraction",
    "grad_norm": "grad_norm",
    "loss": "loss",
    "kl": "kl",
    "staleness": "staleness/mean",
}


def masked_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean over the cells of the mask; 0 where there is none."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)


def support_statistics(rollout: Rollout) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean support size, and share of supports of one id, over sampled tokens."""
    sizes = rollout.support.counts
    is_one = (sizes == 1).astype(jnp.float32)
    return masked_mean(sizes.astype(jnp.float32), rollout.loss_mask), masked_mean(is_one, rollout.loss_mask)


def ratio_statistics(
    ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Largest |ratio - 1|, mean and standard deviation of the ratio over sampled tokens."""
    mean = masked_mean(ratio, mask)
    spread = jnp.sqrt(masked_mean((ratio - mean) ** 2, mask))
    return jnp.where(mask, jnp.abs(ratio - 1), 0.0).max(), mean, spread


def iteration_metrics(
    rollout: Rollout,
    rewards: Rewards,
    first: Pass,
    grad_norm: Float[Array, ""],
    clip_fraction: Float[Array, ""],
    staleness: Float[Array, ""] | None,
) -> Metrics:
    """The metrics of an iteration, from its first pass and, for the clip fraction, from all of them."""
    mask = rollout.loss_mask
    support_size, one_id_share = support_statistics(rollout)
    max_ratio_error, ratio_mean, ratio_std = ratio_statistics(first.ratio, mask)
    lengths = rollout.lengths.astype(jnp.float32)
    return Metrics(
        reward=jnp.asarray(rewards.values).mean(),
        exact=jnp.asarray(rewards.is_exact).mean(dtype=jnp.float32),
        support_size=support_size,
        one_id_share=one_id_share,
        completion_length=lengths.mean(),
        num_tokens=mask.sum(dtype=jnp.float32),
        max_ratio_error=max_ratio_error,
        ratio_mean=ratio_mean,
        ratio_std=ratio_std,
        entropy=masked_mean(first.entropy, mask),
        clip_fraction=clip_fraction,
        grad_norm=grad_norm,
        loss=first.loss,
        kl=None if first.kl is None else masked_mean(first.kl, mask),
        staleness=staleness,
    )
