"""One GRPO iteration: prompts -> rollout -> reward -> advantages -> loss -> update.

With a task on the device all of it is one compiled program with donated state. With a task on the host it is two, and
between them only token ids and lengths come down, and rewards go up.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Key

from jaxmask import Rollout
from models import Decoder, lora
from train.advantages import ADVANTAGES, soft_overlong_punishment
from train.config import GRPOConfig
from train.gradients import Learner, accumulate, logprobs
from train.metrics import Metrics, Pass, iteration_metrics
from train.partition import combine, partition
from train.rollouts import completed, iteration_keys, rollout_key
from train.rows import check_replayable, learner_rows, mean_staleness, trainable
from train.state import TrainState, apply_gradients, averaged
from train.tasks.base import DeviceTask, Prompts, Rewards


def collect(
    state: TrainState,
    key: Key[Array, ""],
    prompts: Prompts,
    *,
    config: GRPOConfig,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> Rollout:
    """`group_size` completions of each prompt, with their supports and the version of the policy.

    Args:
      state: the policy, and its version: the iterations done.
      key: the rows' seeds come from it.
      prompts: one row per prompt.
      config: sampling settings and shapes.
      vocab_size: ids the task knows; a padded head may have more, which are never drawn.
      eos_token_ids: ids that end a completion.
    """
    rollout = completed(
        state.model,
        key,
        prompts,
        config.sampling_params(),
        config=config,
        group_size=config.group_size,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        support_bound=config.top_k,
    )
    versions = jnp.where(rollout.token_mask, state.step, -1)
    return dataclasses.replace(rollout, policy_versions=versions)


def grpo_step(
    state: TrainState,
    rollout: Rollout,
    rewards: Rewards,
    *,
    config: GRPOConfig,
    optimizer: optax.GradientTransformation,
    reference: Decoder | None = None,
    sharding: NamedSharding | PartitionSpec | None = None,
) -> tuple[TrainState, Metrics]:
    """One iteration's updates on a rollout: `num_updates` passes over all its tokens.

    Args:
      state: the learner.
      rollout: sampled by this policy, or a recent one.
      rewards: one per completion.
      config: the loss and how it is cut into micro-batches.
      optimizer: that of `state.opt_state`.
      reference: the policy that `kl_coefficient` holds the trained one to; needed where it is above 0. None: that of
        the state, or, with adapters, the base without them, whose arrays the state already holds.
      sharding: how the logits are cut over a mesh, rows and vocabulary; see `jaxmask.support_log_probs`.

    Raises:
      ValueError: the rollout cannot be replayed (supports left out, other log-probs than `processed_logprobs`), it
        lacks policy versions that the config asks for, its rows do not divide into the micro-batches, or there is no
        reference.

    Source: DeepSeekMath, arXiv 2402.03300, algorithm 1; supports as in DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    check_replayable(rollout, config)
    trained, frozen = partition(state.model)
    if config.kl_coefficient > 0 and reference is None:
        reference = _own_reference(state, config)
    staleness = mean_staleness(rollout, state.step)
    rollout = trainable(rollout, rewards, state.step, config)
    rows = learner_rows(rollout, _advantages(rollout, rewards, config))
    learner = Learner(config, reference, sharding)
    if config.tis_cap is not None and config.num_updates > 1:
        rows = dataclasses.replace(rows, old_logprobs=logprobs(state.model, rows, learner))

    def update(state: TrainState, _: None) -> tuple[TrainState, tuple[Pass, Array]]:
        gradients, done = accumulate(combine(state.model, frozen), rows, learner)
        model, opt_state = apply_gradients(state, gradients, optimizer)
        average = state.average
        if average is not None:
            average = averaged(average, partition(model)[0], config.ema_decay)
        state = dataclasses.replace(state, model=model, opt_state=opt_state, average=average)
        return state, (done, optax.tree.norm(gradients))

    # Frozen weights stay out of what the loop carries.
    state = dataclasses.replace(state, model=trained)
    state, (passes, grad_norms) = jax.lax.scan(update, state, None, length=config.num_updates)
    first = jax.tree.map(lambda leaf: leaf[0], passes)
    metrics = iteration_metrics(rollout, rewards, first, grad_norms[0], passes.clip_fraction.mean(), staleness)
    return dataclasses.replace(state, model=combine(state.model, frozen), step=state.step + 1), metrics


@functools.partial(jax.jit, static_argnames=("task", "config", "optimizer"), donate_argnums=0)
def train_iteration(
    state: TrainState,
    *,
    task: DeviceTask,
    config: GRPOConfig,
    optimizer: optax.GradientTransformation,
    reference: Decoder | None = None,
) -> tuple[TrainState, Metrics]:
    """A whole iteration on the device, as one program; `state` is donated.

    Args:
      state: the learner.
      task: makes prompts and rewards; static.
      config: static.
      optimizer: static; that of `state.opt_state`.
      reference: as in `grpo_step`; it shares no array with the state, which is donated.
    """
    prompts_key, sampling_key = iteration_keys(state.key, state.step)
    prompts = task.prompts(prompts_key, config.num_prompts)
    rollout = collect(
        state,
        sampling_key,
        prompts,
        config=config,
        vocab_size=task.vocab_size,
        eos_token_ids=task.eos_token_ids,
    )
    rewards = task.score(rollout)
    return grpo_step(state, rollout, rewards, config=config, optimizer=optimizer, reference=reference)


@functools.partial(jax.jit, static_argnames=("config", "vocab_size", "eos_token_ids"))
def collect_for_host(
    state: TrainState,
    prompts: Prompts,
    *,
    config: GRPOConfig,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    key: Key[Array, ""] | None = None,
) -> Rollout:
    """The first of the two programs of an iteration whose rewards come from the host.

    Args:
      state: the policy.
      prompts: one row per prompt.
      config: sampling settings and shapes.
      vocab_size: ids the task knows.
      eos_token_ids: ids that end a completion.
      key: see `rollout_key`; None: that of the state's iteration.
    """
    key = rollout_key(state.key, state.step) if key is None else key
    return collect(state, key, prompts, config=config, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


# The second one.
update_from_host = jax.jit(grpo_step, static_argnames=("config", "optimizer", "sharding"), donate_argnums=0)


def _own_reference(state: TrainState, config: GRPOConfig) -> Decoder:
    if state.reference is not None:
        return combine(state.reference, partition(state.model)[1])
    if state.model.config.lora is None:
        raise ValueError(f"kl_coefficient {config.kl_coefficient} needs a reference policy, got none.")
    return lora.detach(state.model)


def _advantages(rollout: Rollout, rewards: Rewards, config: GRPOConfig) -> Float[Array, " B"]:
    values = jnp.asarray(rewards.values)
    if config.overlong_buffer:
        values = values + soft_overlong_punishment(
            rollout.lengths, max_length=config.max_new_tokens, buffer=config.overlong_buffer
        )
    return ADVANTAGES[config.advantages](values, rollout.group_size)
