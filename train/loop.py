"""How an iteration runs, for the two kinds of task."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import optax

from jaxmask import Rollout
from models import Decoder
from train.config import GRPOConfig
from train.metrics import Metrics
from train.state import TrainState
from train.step import collect_for_host, train_iteration, update_from_host
from train.tasks import Cursor, DeviceTask, HostTask, Rewards


@runtime_checkable
class Loop(Protocol):
    """One iteration, and a look at what the policy does."""

    def iterate(self, state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        """The state after iteration `step`, which is `state.step` known on the host; `state` is donated."""
        ...

    def sample(self, state: TrainState, step: int) -> tuple[Rollout, Rewards]:
        """A rollout of iteration `step`'s shape, on prompts of that step, without learning from it."""
        ...


@dataclasses.dataclass(frozen=True)
class DeviceLoop:
    """Everything in one program; compiles at the first iteration."""

    task: DeviceTask
    config: GRPOConfig
    optimizer: optax.GradientTransformation
    reference: Decoder | None = None

    def iterate(self, state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        """See `Loop.iterate`."""
        return train_iteration(
            state, task=self.task, config=self.config, optimizer=self.optimizer, reference=self.reference
        )

    def sample(self, state: TrainState, step: int) -> tuple[Rollout, Rewards]:
        """See `Loop.sample`."""
        make_prompts = jax.jit(self.task.prompts, static_argnums=1)
        prompts = make_prompts(jax.random.fold_in(jax.random.key(step), 1), self.config.num_prompts)
        rollout = collect_for_host(
            state,
            prompts,
            config=self.config,
            vocab_size=self.task.vocab_size,
            eos_token_ids=self.task.eos_token_ids,
        )
        return rollout, jax.jit(self.task.score)(rollout)


@dataclasses.dataclass(frozen=True)
class HostLoop:
    """Two programs; between them token ids come down and rewards go up. Compiles at the first iteration."""

    task: HostTask
    config: GRPOConfig
    optimizer: optax.GradientTransformation
    reference: Decoder | None = None

    def iterate(self, state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        """See `Loop.iterate`."""
        rollout, rewards = self.sample(state, step)
        return update_from_host(
            state, rollout, rewards, config=self.config, optimizer=self.optimizer, reference=self.reference
        )

    def sample(self, state: TrainState, step: int) -> tuple[Rollout, Rewards]:
        """See `Loop.sample`."""
        prompts, entries, _ = self.task.draw(Cursor(0, step * self.config.num_prompts), self.config.num_prompts)
        rollout = collect_for_host(
            state,
            jax.device_put(prompts),
            config=self.config,
            vocab_size=self.task.vocab_size,
            eos_token_ids=self.task.eos_token_ids,
        )
        token_ids, lengths = jax.device_get((rollout.token_ids, rollout.lengths))
        completions = [row[:length].tolist() for row, length in zip(token_ids, lengths, strict=True)]
        rewards = self.task.score(entries, completions, self.config.group_size).rewards
        return rollout, jax.device_put(rewards)
