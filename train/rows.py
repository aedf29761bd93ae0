"""A rollout as the learner reads it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask import Finish, RaggedSupport, Rollout, Support, check_sampling_mask
from jaxmask.replay import Replay
from train.advantages import has_equal_rewards
from train.config import GRPOConfig
from train.metrics import masked_mean
from train.tasks.base import Rewards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnerRows:
    """A rollout as the learner reads it: prompt and completion joined, one row per completion.

    `first_positions` is where the hidden state lies that predicts a row's first generated token.
    `replay` has the edits of the rollout, where it has any.
    `old_logprobs` are those of the policy before the first update, where a loss asks for them.
    """

    token_ids: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    first_positions: Int[Array, " B"]
    sampled_ids: Int[Array, "B T"]
    behaviour_logprobs: Float[Array, "B T"]
    temperature: Float[Array, " B"]
    support: Support | RaggedSupport
    loss_mask: Bool[Array, "B T"]
    advantages: Float[Array, " B"]
    replay: Replay | None = None
    old_logprobs: Float[Array, "B T"] | None = None


def check_replayable(rollout: Rollout, config: GRPOConfig) -> None:
    """Raises ValueError where the learner cannot score what the sampler drew."""
    check_sampling_mask(config.sampling_params(), logprobs_mode=rollout.logprobs_mode)
    if config.max_staleness is not None and rollout.policy_versions is None:
        raise ValueError(f"max_staleness {config.max_staleness} needs Rollout.policy_versions, got none.")
    num_tokens = rollout.token_ids.shape[1]
    if config.aggregation == "constant-length" and num_tokens > config.max_new_tokens:
        raise ValueError(
            f"max_new_tokens must be at least the {num_tokens} tokens of the rollout for aggregation constant-length, "
            f"got {config.max_new_tokens}."
        )
    if rollout.sampling.returns_support is not None and config.sampling_mask:
        raise ValueError("some rows of the rollout left their supports out (return_sampling_mask=False).")
    if rollout.token_ids.shape[0] % config.num_micro_batches:
        raise ValueError(
            f"num_micro_batches must divide the rollout's {rollout.token_ids.shape[0]} rows, "
            f"got {config.num_micro_batches}."
        )


def mean_staleness(rollout: Rollout, step: Int[Array, ""]) -> Float[Array, ""] | None:
    """Iterations between the policy that sampled a token and the one that learns from it; None where nobody knows."""
    if rollout.policy_versions is None:
        return None
    return masked_mean((step - rollout.policy_versions).astype(jnp.float32), rollout.loss_mask)


def without_stale(rollout: Rollout, step: Int[Array, ""], config: GRPOConfig) -> Rollout:
    """The rollout, with tokens that are older than the config allows left out of the loss mask."""
    if config.max_staleness is None or rollout.policy_versions is None:
        return rollout
    is_fresh = step - rollout.policy_versions <= config.max_staleness
    return dataclasses.replace(rollout, sampled_mask=rollout.loss_mask & is_fresh)


def trainable(rollout: Rollout, rewards: Rewards, step: Int[Array, ""], config: GRPOConfig) -> Rollout:
    """The rollout, with what the config does not train on left out of the loss mask, and so of every denominator."""
    rollout = without_stale(rollout, step, config)
    keep = jnp.ones(rollout.lengths.shape, jnp.bool_)
    if config.mask_truncated:
        keep &= rollout.finish == Finish.STOP
    if config.dynamic_sampling:
        keep &= jnp.repeat(~has_equal_rewards(jnp.asarray(rewards.values), rollout.group_size), rollout.group_size)
    if not (config.mask_truncated or config.dynamic_sampling):
        return rollout
    return dataclasses.replace(rollout, sampled_mask=rollout.loss_mask & keep[:, None])


def learner_rows(rollout: Rollout, advantages: Float[Array, " B"]) -> LearnerRows:
    """The rows of a rollout, with one advantage each."""
    prompt_ids = jnp.repeat(rollout.prompt_ids, rollout.group_size, axis=0)
    prompt_lengths = jnp.repeat(rollout.prompt_lengths, rollout.group_size)
    return LearnerRows(
        token_ids=_join(prompt_ids, prompt_lengths, rollout.token_ids),
        lengths=prompt_lengths + rollout.lengths - 1,
        first_positions=prompt_lengths - 1,
        sampled_ids=rollout.token_ids,
        behaviour_logprobs=rollout.logprobs,
        temperature=rollout.sampling.temperature,
        support=rollout.support,
        loss_mask=rollout.loss_mask,
        advantages=advantages,
        replay=Replay.of(rollout),
    )


def _join(
    prompt_ids: Int[Array, "B S"], prompt_lengths: Int[Array, " B"], completion_ids: Int[Array, "B T"]
) -> Int[Array, "B L"]:
    """Each completion right behind its prompt; the last token, which predicts nothing, is left out.

    In: prompt [7, 8, pad], length 2, completion [1, 2]  Out: [7, 8, 1, .]
    """
    joined = jnp.concatenate([prompt_ids, completion_ids], axis=1)
    place = jnp.arange(joined.shape[1] - 1, dtype=jnp.int32)[None, :]
    gap = (prompt_ids.shape[1] - prompt_lengths)[:, None]
    source = jnp.where(place < prompt_lengths[:, None], place, place + gap)
    return jnp.take_along_axis(joined, jnp.minimum(source, joined.shape[1] - 1), axis=1)
