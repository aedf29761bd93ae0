"""The loss that a config names, put together from its parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from train.config import GRPOConfig
from train.correction import sequence_mask, truncated_importance_weights
from train.kl import kl_total
from train.losses import (
    LossInputs,
    LossOutput,
    cispo_loss,
    entropy_total,
    grpo_loss,
    gspo_loss,
    gspo_token_loss,
    reinforce_loss,
)


def _clipped(loss: Callable[..., LossOutput]) -> Callable[[LossInputs, GRPOConfig], LossOutput]:
    return lambda inputs, config: loss(
        inputs, clip_epsilon=config.clip_epsilon, clip_epsilon_high=config.clip_epsilon_high
    )


# The one place where `GRPOConfig.loss` meets the functions.
LOSSES: Mapping[str, Callable[[LossInputs, GRPOConfig], LossOutput]] = MappingProxyType(
    {
        "grpo": _clipped(grpo_loss),
        "gspo": _clipped(gspo_loss),
        "gspo-token": _clipped(gspo_token_loss),
        "cispo": lambda inputs, config: cispo_loss(inputs, clip_epsilon_high=config.upper_clip_epsilon),
        "reinforce": lambda inputs, config: reinforce_loss(inputs),
    }
)


def objective(inputs: LossInputs, config: GRPOConfig) -> LossOutput:
    """The config's loss: policy term with its off-policy weights, less the entropy bonus, plus the KL; undivided.

    With `tis_cap` and without `old_logprobs`, the policy as it is takes the place of the old one, which is right on the
    first pass over a rollout.

    Args:
      inputs: of a part of the batch, with the weights of the whole one's aggregation; `entropy` where it has a
        coefficient; `kl` and `ref_logprobs` where the KL has one.
      config: which loss, and its settings.
    """
    if config.tis_cap is not None and inputs.old_logprobs is None:
        inputs = dataclasses.replace(inputs, old_logprobs=jax.lax.stop_gradient(inputs.logprobs))
    output = LOSSES[config.loss](dataclasses.replace(inputs, correction=_correction(inputs, config)), config)
    total = output.total
    if config.entropy_coefficient > 0:
        total = total - config.entropy_coefficient * entropy_total(inputs)
    if config.kl_coefficient > 0:
        total = total + config.kl_coefficient * kl_total(inputs, config.kl_estimator)
    return dataclasses.replace(output, total=total)


def _correction(inputs: LossInputs, config: GRPOConfig) -> Float[Array, "B T"] | None:
    """Product of the off-policy weights that the config asks for; None where it asks for none."""
    behaviour, mask = inputs.behaviour_logprobs, inputs.loss_mask
    factor = None
    if config.tis_cap is not None:
        assert inputs.old_logprobs is not None
        factor = truncated_importance_weights(inputs.old_logprobs, behaviour, mask, cap=config.tis_cap)
    if config.sequence_ratio_min is not None or config.sequence_ratio_max is not None:
        kept = sequence_mask(
            inputs.logprobs,
            behaviour,
            mask,
            low=0.0 if config.sequence_ratio_min is None else config.sequence_ratio_min,
            high=math.inf if config.sequence_ratio_max is None else config.sequence_ratio_max,
            ratio=config.sequence_ratio,
            advantages=inputs.advantages if config.sequence_negative_only else None,
        )
        kept = jnp.broadcast_to(kept[:, None], mask.shape)
        factor = kept if factor is None else factor * kept
    return factor
