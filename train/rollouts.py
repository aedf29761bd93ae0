"""Completions of prompts in one piece of a program, and where their randomness comes from."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxmask import Rollout, SamplingBatch, SamplingParams, generate
from models import Decoder
from train.config import GRPOConfig
from train.tasks.base import Prompts

# A key's children by `split` are its folds of small numbers.
FIRST_REFILL = 2**31


def completed(
    model: Decoder,
    key: Key[Array, ""],
    prompts: Prompts,
    params: SamplingParams,
    *,
    config: GRPOConfig,
    group_size: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    support_bound: int | None = None,
) -> Rollout:
    """`group_size` completions of each prompt.

    Args:
      model: the policy.
      key: the rows' seeds come from it.
      prompts: one row per prompt.
      params: of every row, but for its seed.
      config: shapes.
      group_size: completions per prompt.
      vocab_size: ids the task knows.
      eos_token_ids: ids that end a completion.
      support_bound: see `SamplingBatch.from_params`.
    """
    num_rows = prompts.lengths.shape[0] * group_size
    batch = SamplingBatch.from_params(
        [params] * num_rows, vocab_size=vocab_size, eos_token_ids=eos_token_ids, support_bound=support_bound
    )
    return generate(
        model,
        dataclasses.replace(batch, seeds=jax.random.bits(key, (num_rows, 2), jnp.uint32)),
        jnp.asarray(prompts.token_ids),
        jnp.asarray(prompts.lengths),
        max_new_tokens=config.max_new_tokens,
        width=min(config.top_k, vocab_size),
        group_size=group_size,
        implementation=config.implementation,
    )


def rollout_key(root: Key[Array, ""], step: int | Int[Array, ""], refill: int = 0) -> Key[Array, ""]:
    """What the seeds of a rollout come from.

    Args:
      root: of the run, `TrainState.key`.
      step: the iteration that the rollout is for.
      refill: counts the further rollouts of one iteration from 1.
    """
    return refill_key(iteration_keys(root, step)[1], refill)


def iteration_keys(root: Key[Array, ""], step: int | Int[Array, ""]) -> Key[Array, " 2"]:
    """What the prompts of an iteration come from, and its rollout."""
    return jax.random.split(jax.random.fold_in(root, step))


def refill_key(key: Key[Array, ""], refill: int) -> Key[Array, ""]:
    """The key of a further rollout in place of that of the first, which is `refill` 0; none of its children either."""
    return jax.random.fold_in(key, FIRST_REFILL + refill) if refill else key
