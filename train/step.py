"""One GRPO iteration: prompts -> rollout -> reward -> advantages -> loss -> update.

With a task on the device all of it is one compiled program with donated state. With a task on the host it is two, and
between them only token ids and lengths come down, and rewards go up.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from jaxmask import (
    Rollout,
    SamplingBatch,
    Scores,
    full_scores,
    generate,
    support_scores,
)
from models import Decoder
from train.advantages import ADVANTAGES, soft_overlong_punishment
from train.aggregation import Aggregation, aggregation
from train.config import GRPOConfig
from train.losses import LossInputs, LossOutput
from train.metrics import Metrics, Pass, iteration_metrics
from train.objective import objective
from train.rows import LearnerRows, check_replayable, learner_rows
from train.state import TrainState, apply_gradients
from train.tasks.base import DeviceTask, Prompts, Rewards

T = TypeVar("T")


def collect(
    model: Decoder,
    key: Key[Array, ""],
    prompts: Prompts,
    *,
    config: GRPOConfig,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> Rollout:
    """`group_size` completions of each prompt, with their supports.

    Args:
      model: the policy.
      key: the rows' seeds come from it.
      prompts: one row per prompt.
      config: sampling settings and shapes.
      vocab_size: ids the task knows; a padded head may have more, which are never drawn.
      eos_token_ids: ids that end a completion.
    """
    batch = SamplingBatch.from_params(
        [config.sampling_params()] * config.num_rows,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        support_bound=config.top_k,
    )
    seeds = jax.random.bits(key, (config.num_rows, 2), jnp.uint32)
    return generate(
        model,
        dataclasses.replace(batch, seeds=seeds),
        jnp.asarray(prompts.token_ids),
        jnp.asarray(prompts.lengths),
        max_new_tokens=config.max_new_tokens,
        width=min(config.top_k, vocab_size),
        group_size=config.group_size,
        implementation=config.implementation,
    )


def grpo_step(
    state: TrainState,
    rollout: Rollout,
    rewards: Rewards,
    *,
    config: GRPOConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """One iteration's updates on a rollout: `num_updates` passes over all its tokens.

    Args:
      state: the learner.
      rollout: sampled by this policy, or a recent one.
      rewards: one per completion.
      config: the loss and how it is cut into micro-batches.
      optimizer: that of `state.opt_state`.

    Raises:
      ValueError: the rollout cannot be replayed (edited logits, supports left out, other log-probs than
        `processed_logprobs`), or its rows do not divide into the micro-batches.

    Source: DeepSeekMath, arXiv 2402.03300, algorithm 1; supports as in DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    check_replayable(rollout, config)
    rows = learner_rows(rollout, _advantages(rollout, rewards, config))
    if config.tis_cap is not None and config.num_updates > 1:
        rows = dataclasses.replace(rows, old_logprobs=_logprobs(state.model, rows, config))

    def update(state: TrainState, _: None) -> tuple[TrainState, tuple[Pass, Array]]:
        gradients, done = _accumulate(state.model, rows, config)
        model, opt_state = apply_gradients(state, gradients, optimizer)
        return dataclasses.replace(state, model=model, opt_state=opt_state), (done, optax.tree.norm(gradients))

    state, (passes, grad_norms) = jax.lax.scan(update, state, None, length=config.num_updates)
    first = jax.tree.map(lambda leaf: leaf[0], passes)
    metrics = iteration_metrics(rollout, rewards, first, grad_norms[0], passes.clip_fraction.mean())
    return dataclasses.replace(state, step=state.step + 1), metrics


@functools.partial(jax.jit, static_argnames=("task", "config", "optimizer"), donate_argnums=0)
def train_iteration(
    state: TrainState, *, task: DeviceTask, config: GRPOConfig, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Metrics]:
    """A whole iteration on the device, as one program; `state` is donated.

    Args:
      state: the learner.
      task: makes prompts and rewards; static.
      config: static.
      optimizer: static; that of `state.opt_state`.
    """
    prompts_key, sampling_key = jax.random.split(jax.random.fold_in(state.key, state.step))
    prompts = task.prompts(prompts_key, config.num_prompts)
    rollout = collect(
        state.model,
        sampling_key,
        prompts,
        config=config,
        vocab_size=task.vocab_size,
        eos_token_ids=task.eos_token_ids,
    )
    return grpo_step(state, rollout, task.score(rollout), config=config, optimizer=optimizer)


@functools.partial(jax.jit, static_argnames=("config", "vocab_size", "eos_token_ids"))
def collect_for_host(
    state: TrainState, prompts: Prompts, *, config: GRPOConfig, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Rollout:
    """The first of the two programs of an iteration whose rewards come from the host."""
    _, sampling_key = jax.random.split(jax.random.fold_in(state.key, state.step))
    return collect(
        state.model, sampling_key, prompts, config=config, vocab_size=vocab_size, eos_token_ids=eos_token_ids
    )


# The second one.
update_from_host = jax.jit(grpo_step, static_argnames=("config", "optimizer"), donate_argnums=0)


def _score(model: Decoder, rows: LearnerRows, config: GRPOConfig) -> Scores:
    """The policy's scores of the sampled tokens, on their supports or, without the mask, on the whole vocabulary."""
    hidden = model.hidden(rows.token_ids, rows.lengths)
    steps = jnp.arange(rows.sampled_ids.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.minimum(rows.first_positions[:, None] + steps, hidden.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
    # Whatever a cell that was not sampled holds, NaN included, must not reach the gradient of the head.
    hidden = jnp.where(rows.loss_mask[:, :, None], hidden, jnp.zeros((), hidden.dtype))
    temperature = jnp.broadcast_to(rows.temperature[:, None], rows.sampled_ids.shape)
    if config.sampling_mask:
        return support_scores(
            hidden,
            model.head,
            rows.support,
            rows.sampled_ids,
            temperature=temperature,
            edit=None if rows.replay is None else rows.replay.edited,
            implementation=config.implementation,
        )
    head = model.head[: rows.support.vocab_size]
    return full_scores(hidden, head, rows.sampled_ids, temperature=temperature)


def _loss(
    model: Decoder, rows: LearnerRows, aggregated: Aggregation, config: GRPOConfig
) -> tuple[Float[Array, ""], tuple[LossOutput, Float[Array, "B T"]]]:
    scores = _score(model, rows, config)
    inputs = LossInputs(
        scores.logprobs,
        rows.behaviour_logprobs,
        rows.advantages,
        rows.loss_mask,
        weights=aggregated.weights,
        old_logprobs=rows.old_logprobs,
        entropy=scores.entropy,
    )
    output = objective(inputs, config)
    return output.total / aggregated.denominator, (output, scores.entropy)


def _accumulate(model: Decoder, rows: LearnerRows, config: GRPOConfig) -> tuple[Decoder, Pass]:
    """The gradient of the loss over all rows, and what the pass saw; the cut changes neither."""
    # Those of the whole batch, known beforehand, so that parts add up to the undivided loss.
    whole = aggregation(rows.loss_mask, config.aggregation, max_length=config.max_new_tokens)

    def add_part(
        gradients: Decoder, part: tuple[LearnerRows, Array]
    ) -> tuple[Decoder, tuple[Array, tuple[LossOutput, Array]]]:
        part_rows, weights = part
        aggregated = Aggregation(weights, whole.denominator)
        (loss, seen), new = jax.value_and_grad(_loss, has_aux=True)(model, part_rows, aggregated, config)
        return jax.tree.map(jnp.add, gradients, new), (loss, seen)

    zeros = jax.tree.map(jnp.zeros_like, model)
    gradients, (losses, (outputs, entropy)) = jax.lax.scan(add_part, zeros, _cut((rows, whole.weights), config))
    shape = rows.loss_mask.shape
    num_tokens = jnp.maximum(rows.loss_mask.sum(dtype=jnp.float32), 1.0)
    return gradients, Pass(
        losses.sum(), outputs.num_clipped.sum() / num_tokens, outputs.ratio.reshape(shape), entropy.reshape(shape)
    )


def _logprobs(model: Decoder, rows: LearnerRows, config: GRPOConfig) -> Float[Array, "B T"]:
    logprobs = jax.lax.map(lambda part: _score(model, part, config).logprobs, _cut(rows, config))
    return logprobs.reshape(rows.loss_mask.shape)


def _cut(tree: T, config: GRPOConfig) -> T:
    """The rows of every leaf in as many parts as there are micro-batches."""
    return jax.tree.map(lambda leaf: leaf.reshape(config.num_micro_batches, -1, *leaf.shape[1:]), tree)


def _advantages(rollout: Rollout, rewards: Rewards, config: GRPOConfig) -> Float[Array, " B"]:
    values = jnp.asarray(rewards.values)
    if config.overlong_buffer:
        values = values + soft_overlong_punishment(
            rollout.lengths, max_length=config.max_new_tokens, buffer=config.overlong_buffer
        )
    return ADVANTAGES[config.advantages](values, rollout.group_size)
