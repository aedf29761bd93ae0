"""What a run reports of each iteration."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmask import Finish, RaggedSupport, Rollout
from train.advantages import has_equal_rewards
from train.tasks.base import Rewards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """What one iteration saw: float32 scalars, and a histogram. Means over tokens are over the loss mask, 0 if empty.

    Attributes:
      reward: mean over completions.
      reward_std: mean over prompts of the standard deviation of their group's rewards, which divides by G - 1.
      zero_std_share: share of groups whose rewards are all equal, so that they teach nothing.
      exact: share of completions that are fully right.
      support_size: mean ids per sampled token.
      support_median: the least size that at least half of the sampled tokens do not exceed.
      support_p99: the same of 99 in 100.
      one_id_share: share of tokens whose support held one id: no choice, log-probability 0, no gradient.
      overflow_rate: share of tokens whose support was wider than its compact cells, so that it needed packed bits;
        where supports share a pool (`RaggedSupport`), share of completions that ended because it was full.
      support_histogram: sampled tokens by support size, in buckets 1, 2, 3 to 4, 5 to 8, ... up to the vocabulary.
      completion_length: mean tokens per completion.
      truncated_share: share of completions that reached their limit before a stop id.
      num_tokens: tokens of the loss mask.
      max_ratio_error: largest |ratio - 1| on the first pass, where policy and behaviour have the same weights.
      ratio_mean: on the first pass.
      ratio_std: on the first pass.
      mismatch_kl: estimate of KL(behaviour || policy) on the first pass, the mean of ratio - 1 - log ratio (k3), >= 0.
      entropy: mean over tokens of the entropy of the scored distribution, in nats.
      clip_fraction: share of tokens whose gradient the clip removed, over all passes.
      grad_norm: global norm of the gradient of the first pass, before it is clipped.
      loss: of the first pass, aggregated as the config says.
      kl: mean KL from the reference policy over tokens, on the first pass, in nats; None where the loss has none.
      staleness: mean iterations between the policy that sampled a token and the one that learned from it; None where
        the rollout does not say.
    """

    reward: Float[Array | np.ndarray, ""]
    reward_std: Float[Array | np.ndarray, ""]
    zero_std_share: Float[Array | np.ndarray, ""]
    exact: Float[Array | np.ndarray, ""]
    support_size: Float[Array | np.ndarray, ""]
    support_median: Float[Array | np.ndarray, ""]
    support_p99: Float[Array | np.ndarray, ""]
    one_id_share: Float[Array | np.ndarray, ""]
    overflow_rate: Float[Array | np.ndarray, ""]
    support_histogram: Int[Array | np.ndarray, " K"]
    completion_length: Float[Array | np.ndarray, ""]
    truncated_share: Float[Array | np.ndarray, ""]
    num_tokens: Float[Array | np.ndarray, ""]
    max_ratio_error: Float[Array | np.ndarray, ""]
    ratio_mean: Float[Array | np.ndarray, ""]
    ratio_std: Float[Array | np.ndarray, ""]
    mismatch_kl: Float[Array | np.ndarray, ""]
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
    "reward_std": "rewards/std",
    "zero_std_share": "rewards/zero_std_share",
    "exact": "rewards/exact",
    "support_size": "support/size_mean",
    "support_median": "support/size_median",
    "support_p99": "support/size_p99",
    "one_id_share": "support/one_id_share",
    "overflow_rate": "support/overflow_rate",
    "support_histogram": "support/histogram",
    "completion_length": "completions/mean_length",
    "truncated_share": "completions/truncated_share",
    "num_tokens": "completions/num_tokens",
    "max_ratio_error": "ratio/max_error",
    "ratio_mean": "ratio/mean",
    "ratio_std": "ratio/std",
    "mismatch_kl": "ratio/mismatch_kl",
    "entropy": "entropy",
    "clip_fraction": "clip_fraction",
    "grad_norm": "grad_norm",
    "loss": "loss",
    "kl": "kl",
    "staleness": "staleness/mean",
}


def metrics_row(metrics: Metrics) -> dict[str, Any]:
    """Metrics by their names in files: floats, and a histogram as a list of integers; nothing for those that are None.

    Args:
      metrics: on the host or the device; all of them come down in one transfer.
    """
    found = jax.device_get(metrics)
    values = {name: getattr(found, field) for field, name in NAMES.items()}
    return {name: value.tolist() for name, value in values.items() if value is not None}


def masked_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean over the cells of the mask; 0 where there is none."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)


def group_statistics(values: Float[Array, " B"], group_size: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean standard deviation of the groups' rewards (dividing by G - 1), and share of groups of equal rewards.

    Source: reward_std of TRL's GRPOTrainer.
    """
    groups = values.reshape(-1, group_size)
    # Not by the deviation: rounding leaves one where there is none.
    is_equal = has_equal_rewards(values, group_size)
    squares = ((groups - groups.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    spread = jnp.where(is_equal, 0.0, jnp.sqrt(squares / max(group_size - 1, 1)))
    return spread.mean(), is_equal.mean(dtype=jnp.float32)


def size_quantile(sizes: Int[Array, "B T"], mask: Bool[Array, "B T"], one_in: int) -> Float[Array, ""]:
    """The least size that all but one in `one_in` of the masked cells do not exceed; 0 where there is none."""
    ordered = jnp.sort(jnp.where(mask, sizes, jnp.iinfo(jnp.int32).max).reshape(-1))
    num = mask.sum(dtype=jnp.int32)
    # ceil((1 - 1 / one_in) num), whose product would not fit 32 bits.
    rank = num - num // one_in
    return jnp.where(num > 0, ordered[jnp.maximum(rank - 1, 0)], 0).astype(jnp.float32)


def size_histogram(sizes: Int[Array, "B T"], mask: Bool[Array, "B T"], vocab_size: int) -> Int[Array, " K"]:
    """Masked cells by size, in buckets 1, 2, 3 to 4, 5 to 8, ..., of which the last holds the vocabulary's."""
    bucket = 32 - jax.lax.clz(sizes - 1)
    buckets = jnp.arange((vocab_size - 1).bit_length() + 1, dtype=jnp.int32)
    return (mask[..., None] & (bucket[..., None] == buckets[None, None])).sum(axis=(0, 1), dtype=jnp.int32)


def overflow_rate(rollout: Rollout) -> Float[Array, ""]:
    """See `Metrics`."""
    support = rollout.support
    if isinstance(support, RaggedSupport):
        return (rollout.finish == Finish.OVERFLOW).mean(dtype=jnp.float32)
    return masked_mean((support.counts > support.width).astype(jnp.float32), rollout.loss_mask)


def ratio_statistics(
    ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Largest |ratio - 1|, mean and standard deviation of the ratio over sampled tokens."""
    mean = masked_mean(ratio, mask)
    spread = jnp.sqrt(masked_mean((ratio - mean) ** 2, mask))
    return jnp.where(mask, jnp.abs(ratio - 1), 0.0).max(), mean, spread


def mismatch_kl(ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean of ratio - 1 - log ratio over sampled tokens, >= 0.

    Source: Schulman, "Approximating KL divergence", estimator k3 of KL(behaviour || policy) on the behaviour's tokens.
    """
    excess = ratio - 1
    # Near 1, where the ratio belongs, the logarithm of a rounded ratio would leave its rounding alone.
    logs = jnp.where(jnp.abs(excess) < 0.5, jnp.log1p(excess), jnp.log(ratio))
    return masked_mean(jnp.maximum(excess - logs, 0.0), mask)


def iteration_metrics(
    rollout: Rollout,
    rewards: Rewards,
    first: Pass,
    grad_norm: Float[Array, ""],
    clip_fraction: Float[Array, ""],
    staleness: Float[Array, ""] | None,
) -> Metrics:
    """The metrics of an iteration, from its first pass and, for the clip fraction, from all of them."""
    mask, sizes = rollout.loss_mask, rollout.support.counts
    values = jnp.asarray(rewards.values)
    reward_std, zero_std_share = group_statistics(values, rollout.group_size)
    max_ratio_error, ratio_mean, ratio_std = ratio_statistics(first.ratio, mask)
    return Metrics(
        reward=values.mean(),
        reward_std=reward_std,
        zero_std_share=zero_std_share,
        exact=jnp.asarray(rewards.is_exact).mean(dtype=jnp.float32),
        support_size=masked_mean(sizes.astype(jnp.float32), mask),
        support_median=size_quantile(sizes, mask, 2),
        support_p99=size_quantile(sizes, mask, 100),
        one_id_share=masked_mean((sizes == 1).astype(jnp.float32), mask),
        overflow_rate=overflow_rate(rollout),
        support_histogram=size_histogram(sizes, mask, rollout.support.vocab_size),
        completion_length=rollout.lengths.astype(jnp.float32).mean(),
        truncated_share=(rollout.finish == Finish.LENGTH).mean(dtype=jnp.float32),
        num_tokens=mask.sum(dtype=jnp.float32),
        max_ratio_error=max_ratio_error,
        ratio_mean=ratio_mean,
        ratio_std=ratio_std,
        mismatch_kl=mismatch_kl(first.ratio, mask),
        entropy=masked_mean(first.entropy, mask),
        clip_fraction=clip_fraction,
        grad_norm=grad_norm,
        loss=first.loss,
        kl=None if first.kl is None else masked_mean(first.kl, mask),
        staleness=staleness,
    )
