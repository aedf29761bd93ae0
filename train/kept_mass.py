"""How much of the policy the supports kept: what a learner without them would take for a change of the policy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmask import Rollout
from models import Decoder
from train.config import GRPOConfig
from train.gradients import Learner, logprobs
from train.metrics import masked_mean
from train.rows import check_replayable, learner_rows


@functools.partial(jax.jit, static_argnames="config")
def kept_mass(model: Decoder, rollout: Rollout, config: GRPOConfig) -> Float[Array, ""]:
    """Mean over sampled tokens of the probability that the full policy gives to the token's support; in [0, 1].

    Costs two passes without gradients, one of them over the whole vocabulary: for a look now and then. 0 where the loss
    mask is empty.

    Args:
      model: any policy; the one that sampled, for what truncation took away.
      rollout: with its supports.
      config: its temperature, filters and edits are those of the rollout; micro-batches bound the memory.

    Raises:
      ValueError: the rollout cannot be replayed, or its rows do not divide into the micro-batches.
    """
    return masked_mean(token_kept_mass(model, rollout, config), rollout.loss_mask)


def token_kept_mass(model: Decoder, rollout: Rollout, config: GRPOConfig) -> Float[Array, "B T"]:
    """The kept mass of each token, sum_{v in support} p(v); means nothing outside the loss mask.

    p(a) over the vocabulary is p(a) over the support times the mass, so that the sampled token's two log-probabilities
    are enough: mass = exp(log p_full - log p_support).
    """
    config = dataclasses.replace(config, sampling_mask=True)
    check_replayable(rollout, config)
    rows = learner_rows(rollout, jnp.zeros(rollout.lengths.shape, jnp.float32))
    kept = logprobs(model, rows, Learner(config))
    full = logprobs(model, rows, Learner(dataclasses.replace(config, sampling_mask=False)))
    # Above 1 by no more than rounding.
    return jnp.minimum(jnp.exp(jnp.where(rollout.loss_mask, full - kept, 0.0)), 1.0)
