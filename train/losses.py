"""Policy losses: what each needs, and what it gives back. Sums and denominators stay apart until the end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# exp(20) = 4.9e8: far beyond any clip, far from overflow.
MAX_LOG_RATIO = 20.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossInputs:
    """Everything a policy loss looks at. Cells outside the loss mask may hold anything.

    Attributes:
      logprobs: of the sampled tokens under the policy being trained.
      behaviour_logprobs: of the same tokens when they were sampled.
      advantages: one per completion.
      loss_mask: which cells were sampled.
    """

    logprobs: Float[Array, "B T"]
    behaviour_logprobs: Float[Array, "B T"]
    advantages: Float[Array, " B"]
    loss_mask: Bool[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossOutput:
    """A loss before its division, so that micro-batches (M, where they are stacked) can add theirs up.

    Attributes:
      total: sum over the tokens of the loss mask.
      num_tokens: tokens of the loss mask.
      num_clipped: tokens whose gradient the clip removed.
      ratio: pi / pi_behaviour of each token; 1 outside the loss mask.
    """

    total: Float[Array, "*M"]
    num_tokens: Float[Array, "*M"]
    num_clipped: Float[Array, "*M"]
    ratio: Float[Array, "*M B T"]


def grpo_loss(inputs: LossInputs, *, clip_epsilon: float) -> LossOutput:
    """Sum of -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A) over sampled tokens, ratio = pi / pi_behaviour.

    Args:
      inputs: see `LossInputs`.
      clip_epsilon: in (0, 1).

    Source: DeepSeekMath, arXiv 2402.03300, equation 3, without the KL term; token mean as in DAPO, arXiv 2503.14476,
      section 3.3, once `total` is divided by `num_tokens`.
    """
    mask = inputs.loss_mask
    log_ratio = jnp.where(mask, inputs.logprobs, 0.0) - jnp.where(mask, inputs.behaviour_logprobs, 0.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    advantages = jnp.broadcast_to(inputs.advantages[:, None], ratio.shape)
    unclipped = ratio * advantages
    clipped = jnp.clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon) * advantages
    count = jnp.float32
    return LossOutput(
        total=jnp.where(mask, -jnp.minimum(unclipped, clipped), 0.0).sum(),
        num_tokens=mask.sum(dtype=count),
        num_clipped=(mask & (clipped < unclipped)).sum(dtype=count),
        ratio=ratio,
    )
