"""How far a policy is from a reference, per sampled token, from log-probabilities on the same supports.

All estimate KL(policy || reference) with tokens of the policy. Over a support of a few ids that divergence is a short
sum ("exact", computed where the kept logits are), which has less variance than any estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jaxtyping import Array, Float

from train.losses import MAX_LOG_RATIO, LossInputs, weighted_total

# Below it, exp(d) - 1 - d cancels in float32; four terms of its series are exact to 1e-7 there.
_SERIES_BELOW = 1 / 16


def kl_k1(logprobs: Float[Array, "*B"], ref_logprobs: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """log pi - log ref: unbiased, of either sign, large variance.

    As a term of the loss its gradient is that of log pi, whose expectation is 0: it holds nothing back. Use it to
    measure, or inside rewards.

    Args:
      logprobs: of the sampled tokens under the policy.
      ref_logprobs: of the same tokens, on the same support and temperature, under the reference.

    Source: J. Schulman, "Approximating KL divergence", 2020, joschu.net/blog/kl-approx.html.
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Float[Array, "*B"], ref_logprobs: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """(log pi - log ref)^2 / 2: never negative, biased in value.

    As a term of the loss, on tokens of the policy, its gradient is that of KL(pi || ref), without bias.

    Args:
      logprobs: of the sampled tokens under the policy.
      ref_logprobs: of the same tokens, on the same support and temperature, under the reference.

    Source: J. Schulman, "Approximating KL divergence", 2020; for the gradient Tang and Munos, arXiv 2506.09477.
    """
    return (logprobs - ref_logprobs) ** 2 / 2


def kl_k3(logprobs: Float[Array, "*B"], ref_logprobs: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """exp(d) - 1 - d with d = log ref - log pi: unbiased in value, never negative; that of GRPO.

    As a term of the loss, on tokens of the policy, its gradient is that of KL(ref || pi). d is cut at 20, in both
    places, so that nothing overflows; beyond it the gradient is 0.

    Args:
      logprobs: of the sampled tokens under the policy.
      ref_logprobs: of the same tokens, on the same support and temperature, under the reference.

    Source: DeepSeekMath, arXiv 2402.03300, equation 4; J. Schulman, "Approximating KL divergence", 2020.
    """
    d = jnp.minimum(ref_logprobs - logprobs, MAX_LOG_RATIO)
    is_small = jnp.abs(d) < _SERIES_BELOW
    small = jnp.where(is_small, d, 0.0)
    series = small**2 * (1 / 2 + small * (1 / 6 + small * (1 / 24 + small / 120)))
    return jnp.where(is_small, series, jnp.expm1(d) - d)


# The one place where the name of an estimator meets its function.
KL_ESTIMATORS: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType({"k1": kl_k1, "k2": kl_k2, "k3": kl_k3})


def token_kl(inputs: LossInputs, estimator: str) -> Float[Array, "B T"]:
    """KL of each sampled token from the reference; 0 outside the loss mask, whatever lies there.

    Args:
      inputs: with `ref_logprobs`; with `kl` for "exact".
      estimator: "k1", "k2", "k3", or "exact".

    Raises:
      ValueError: no such estimator, or the inputs lack what it reads.
    """
    if estimator != "exact" and estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be one of {', '.join((*KL_ESTIMATORS, 'exact'))}, got {estimator!r}.")
    values = inputs.kl if estimator == "exact" else inputs.ref_logprobs
    if values is None:
        needed = "kl" if estimator == "exact" else "ref_logprobs"
        raise ValueError(f"kl_estimator {estimator!r} needs LossInputs.{needed}.")
    values = jnp.where(inputs.loss_mask, values, 0.0)
    if estimator == "exact":
        return values
    return KL_ESTIMATORS[estimator](jnp.where(inputs.loss_mask, inputs.logprobs, 0.0), values)


def kl_total(inputs: LossInputs, estimator: str) -> Float[Array, ""]:
    """Sum of weight times KL over sampled tokens, to be added to a loss's total times its coefficient.

    Without importance weights: tokens count as the policy's own, as in GRPO.

    Args:
      inputs: see `token_kl`.
      estimator: see `token_kl`.

    Source: DeepSeekMath, arXiv 2402.03300, equation 3 (beta D_KL inside the mean over tokens).
    """
    return weighted_total(inputs, token_kl(inputs, estimator))
