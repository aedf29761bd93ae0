"""A rollout as the learner reads it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask import Rollout, Support, check_sampling_mask
from jaxmask.replay import Replay
from train.config import GRPOConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnerRows:
    """A rollout as the learner reads it: prompt and completion joined, one row per completion.

    `first_positions` is where the hidden state lies that predicts a row's first generated token.
    `replay` has the edits of the rollout, where it has any.
    `old_logprobs` are those of the policy before the first update, where a loss asks for them.
    M: micro-batches, while the rows are cut into them.
    """

    token_ids: Int[Array, "*M B L"]
    lengths: Int[Array, "*M B"]
    first_positions: Int[Array, "*M B"]
    sampled_ids: Int[Array, "*M B T"]
    behaviour_logprobs: Float[Array, "*M B T"]
    temperature: Float[Array, "*M B"]
    support: Support
    loss_mask: Bool[Array, "*M B T"]
    advantages: Float[Array, "*M B"]
    replay: Replay | None = None
    old_logprobs: Float[Array, "*M B T"] | None = None


def check_replayable(rollout: Rollout, config: GRPOConfig) -> None:
    """Raises ValueError where the learner cannot score what the sampler drew."""
    check_sampling_mask(config.sampling_params(), logprobs_mode=rollout.logprobs_mode)
    if rollout.sampling.is_edited and (not config.sampling_mask or rollout.support.packed is not None):
        raise ValueError(
            "the rollout's logits were edited (penalties, bias, bad words, ...), which is replayed on compact supports "
            "alone: sample with top_k at most the width, and score with sampling_mask=True."
        )
    if rollout.sampling.returns_support is not None and config.sampling_mask:
        raise ValueError("some rows of the rollout left their supports out (return_sampling_mask=False).")
    if rollout.token_ids.shape[0] % config.num_micro_batches:
        raise ValueError(
            f"num_micro_batches must divide the rollout's {rollout.token_ids.shape[0]} rows, "
            f"got {config.num_micro_batches}."
        )


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
