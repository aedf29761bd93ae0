"""Policy losses: what each needs, and what it gives back. Sums and denominators stay apart until the end.

One function per formula, each of the policy term alone: KL is in `train.kl`, weights of off-policy tokens in
`train.correction`, weights of the aggregation in `train.aggregation`. No critic, no per-token returns.
"""

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
      advantages: one per completion, or one per token.
      loss_mask: which cells were sampled.
      weights: of each token in the total, from `train.aggregation`; None: 1.
      old_logprobs: under the policy before the first update on this rollout, the denominator of the ratio that is
        clipped; None: the behaviour policy takes its place.
      correction: factor of each token's policy term, from `train.correction`; a constant; None: 1.
      ref_logprobs: under the reference policy, on the same supports; None where no KL term reads it.
      kl: KL(policy || reference) over each token's support, differentiable; None where nothing reads it.
      entropy: of the policy on each token's support, in nats, differentiable; None where nothing reads it.
    """

    logprobs: Float[Array, "B T"]
    behaviour_logprobs: Float[Array, "B T"]
    advantages: Float[Array, " B"] | Float[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    weights: Float[Array, "B T"] | None = None
    old_logprobs: Float[Array, "B T"] | None = None
    correction: Float[Array, "B T"] | None = None
    ref_logprobs: Float[Array, "B T"] | None = None
    kl: Float[Array, "B T"] | None = None
    entropy: Float[Array, "B T"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossOutput:
    """A loss before its division, so that micro-batches (M, where they are stacked) can add theirs up.

    Attributes:
      total: weighted sum over the tokens of the loss mask.
      num_tokens: tokens of the loss mask.
      num_clipped: tokens whose gradient the clip removed or, in CISPO, whose weight it cut.
      ratio: pi / pi_behaviour of each token; 1 outside the loss mask.
    """

    total: Float[Array, "*M"]
    num_tokens: Float[Array, "*M"]
    num_clipped: Float[Array, "*M"]
    ratio: Float[Array, "*M B T"]


def grpo_loss(inputs: LossInputs, *, clip_epsilon: float, clip_epsilon_high: float | None = None) -> LossOutput:
    """Sum of -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A) over sampled tokens, ratio = pi / pi_old.

    That of GRPO, Dr. GRPO and DAPO, which differ in aggregation, advantages and epsilon_high.

    Args:
      inputs: see `LossInputs`.
      clip_epsilon: in (0, 1).
      clip_epsilon_high: > 0; None: clip_epsilon. DAPO's clip-higher takes 0.28 beside 0.2.

    Source: DeepSeekMath, arXiv 2402.03300, equation 3, without the KL term; Dr. GRPO, arXiv 2503.20783, section 3.2;
      DAPO, arXiv 2503.14476, equation 8.
    """
    ratio = _ratio(_log_ratio(inputs, _old_logprobs(inputs)))
    advantages = _token_advantages(inputs)
    return _output(inputs, *_clipped(ratio, advantages, clip_epsilon, clip_epsilon_high))


def gspo_loss(inputs: LossInputs, *, clip_epsilon: float, clip_epsilon_high: float | None = None) -> LossOutput:
    """Sum of -min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A) over sampled tokens, s = (pi(o) / pi_old(o))^(1/|o|).

    Each token carries its sequence's term, so seq-mean-token-mean gives the paper's mean over sequences. Where
    advantages are per token, A is their mean over the sequence's sampled tokens.

    Args:
      inputs: see `LossInputs`.
      clip_epsilon: in (0, 1); the paper's is 3e-4, since s stays far closer to 1 than a token's ratio.
      clip_epsilon_high: > 0; None: clip_epsilon. The paper's is 4e-4.

    Source: GSPO, arXiv 2507.18071, equations 5 and 7.
    """
    mask = inputs.loss_mask
    advantages = inputs.advantages if inputs.advantages.ndim == 1 else sequence_mean(inputs.advantages, mask)
    ratio = _ratio(sequence_mean(_log_ratio(inputs, _old_logprobs(inputs)), mask))
    of_sequences = _clipped(ratio, advantages, clip_epsilon, clip_epsilon_high)
    return _output(inputs, *(jnp.broadcast_to(values[:, None], mask.shape) for values in of_sequences))


def gspo_token_loss(inputs: LossInputs, *, clip_epsilon: float, clip_epsilon_high: float | None = None) -> LossOutput:
    """Sum of -min(s_t A_t, clip(s_t, 1 - epsilon, 1 + epsilon_high) A_t) over sampled tokens.

    s_t = stop(s) pi_t / stop(pi_t), s of `gspo_loss`; tokens have their own advantages. Where those of a completion are
    equal, value and gradient are those of `gspo_loss`.

    Args:
      inputs: see `LossInputs`.
      clip_epsilon: in (0, 1).
      clip_epsilon_high: > 0; None: clip_epsilon.

    Source: GSPO, arXiv 2507.18071, equations 13 and 14.
    """
    mask = inputs.loss_mask
    sequence = _ratio(sequence_mean(_log_ratio(inputs, _old_logprobs(inputs)), mask))
    logprobs = jnp.where(mask, inputs.logprobs, 0.0)
    # 1 in value; its gradient is that of log pi.
    one = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    ratio = jax.lax.stop_gradient(sequence)[:, None] * one
    advantages = _token_advantages(inputs)
    return _output(inputs, *_clipped(ratio, advantages, clip_epsilon, clip_epsilon_high))


def cispo_loss(inputs: LossInputs, *, clip_epsilon_high: float, clip_epsilon: float = 1.0) -> LossOutput:
    """Sum of -stop(clip(ratio, 1 - epsilon, 1 + epsilon_high)) A log pi over sampled tokens, ratio = pi / pi_old.

    The clip bounds a token's weight and never takes its gradient away.

    Args:
      inputs: see `LossInputs`.
      clip_epsilon_high: > 0.
      clip_epsilon: in (0, 1]; 1, as in the paper's runs, is no lower bound.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    ratio = _ratio(_log_ratio(inputs, _old_logprobs(inputs)))
    weight = jnp.clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon_high)
    logprobs = jnp.where(inputs.loss_mask, inputs.logprobs, 0.0)
    return _output(inputs, -jax.lax.stop_gradient(weight) * _token_advantages(inputs) * logprobs, weight != ratio)


def reinforce_loss(inputs: LossInputs) -> LossOutput:
    """Sum of -A log pi over sampled tokens: no ratio, so exact on tokens of the policy itself.

    Tokens of an older policy need `LossInputs.correction`.

    Args:
      inputs: see `LossInputs`.

    Source: Williams 1992, section 5; RLOO, arXiv 2402.14740, section 3.
    """
    logprobs = jnp.where(inputs.loss_mask, inputs.logprobs, 0.0)
    return _output(inputs, -_token_advantages(inputs) * logprobs, jnp.zeros_like(inputs.loss_mask))


def entropy_total(inputs: LossInputs) -> Float[Array, ""]:
    """Sum of weight times entropy over sampled tokens, to be taken from a loss's total times its coefficient.

    Args:
      inputs: with `entropy`.

    Raises:
      ValueError: the inputs have no entropy.

    Source: Mnih et al., arXiv 1602.01783, section 4; PPO, arXiv 1707.06347, equation 9.
    """
    if inputs.entropy is None:
        raise ValueError("an entropy bonus needs LossInputs.entropy.")
    return weighted_total(inputs, inputs.entropy)


def weighted_total(inputs: LossInputs, values: Float[Array, "B T"]) -> Float[Array, ""]:
    """Sum of weight times value over sampled tokens; what lies in other cells, NaN included, reaches nothing."""
    mask = inputs.loss_mask
    kept = jnp.where(mask, values, 0.0)
    return (kept if inputs.weights is None else kept * jnp.where(mask, inputs.weights, 0.0)).sum()


def sequence_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Mean over each row's cells of the mask; 0 where it has none."""
    return jnp.where(mask, values, 0.0).sum(axis=1) / jnp.maximum(mask.sum(axis=1, dtype=jnp.float32), 1.0)


def _old_logprobs(inputs: LossInputs) -> Float[Array, "B T"]:
    return inputs.behaviour_logprobs if inputs.old_logprobs is None else inputs.old_logprobs


def _log_ratio(inputs: LossInputs, base: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(inputs.loss_mask, inputs.logprobs, 0.0) - jnp.where(inputs.loss_mask, base, 0.0)


def _ratio(log_ratio: Float[Array, "*B"]) -> Float[Array, "*B"]:
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(
    ratio: Float[Array, "*B"], advantages: Float[Array, "*B"], low: float, high: float | None
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), and where the clip takes the gradient away."""
    unclipped = ratio * advantages
    clipped = jnp.clip(ratio, 1 - low, 1 + (low if high is None else high)) * advantages
    return -jnp.minimum(unclipped, clipped), clipped < unclipped


def _token_advantages(inputs: LossInputs) -> Float[Array, "B T"]:
    if inputs.advantages.ndim == 1:
        return jnp.broadcast_to(inputs.advantages[:, None], inputs.loss_mask.shape)
    return jnp.where(inputs.loss_mask, inputs.advantages, 0.0)


def _output(inputs: LossInputs, losses: Float[Array, "B T"], is_clipped: Bool[Array, "B T"]) -> LossOutput:
    mask, count = inputs.loss_mask, jnp.float32
    if inputs.correction is not None:
        losses = losses * jax.lax.stop_gradient(jnp.where(mask, inputs.correction, 0.0))
    return LossOutput(
        total=weighted_total(inputs, losses),
        num_tokens=mask.sum(dtype=count),
        num_clipped=(mask & is_clipped).sum(dtype=count),
        ratio=_ratio(_log_ratio(inputs, inputs.behaviour_logprobs)),
    )
