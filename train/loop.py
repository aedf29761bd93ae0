"""How an iteration runs, for the two kinds of task."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from jaxtyping import Array, Key

from jaxmask import Rollout
from models import Decoder
from train import processes
from train.clock import Clock
from train.config import GRPOConfig
from train.metrics import Metrics
from train.progress import RunState
from train.refill import num_flat, refill_details, refilled, with_counts
from train.rollouts import iteration_keys, refill_key, rollout_key
from train.state import TrainState
from train.step import collect_for_host, train_iteration, update_from_host
from train.tasks import Cursor, DeviceTask, HostTask, Prompts, Rewards, Scored


@dataclasses.dataclass(frozen=True)
class Iteration:
    """What one iteration leaves beside the state.

    Attributes:
      metrics: of the learner, on the device.
      details: of the rewards, by their names in files.
      seconds: spent in "rollout", "reward" and "update", where they are apart; waiting for the device included.
    """

    metrics: Metrics
    details: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


Look = Callable[[Decoder, Rollout, Rewards], None]


@runtime_checkable
class Loop(Protocol):
    """One iteration, and a look at what the policy does."""

    def iterate(self, run: RunState, step: int, look: Look | None = None) -> tuple[RunState, Iteration]:
        """The run after iteration `step`, which is `run.train.step` known on the host; its arrays are donated.

        Before the update, `look` is shown the policy and a rollout: the one that is trained on, where it leaves the
        program, else another one of the same prompts and seeds.
        """
        ...

    def sample(self, run: RunState, step: int) -> tuple[Rollout, Rewards]:
        """A rollout of an iteration's shape, on prompts of that step, without learning from it."""
        ...


@functools.partial(jax.jit, static_argnums=(0, 2))
def make_prompts(task: DeviceTask, key: Key[Array, ""], num: int) -> Prompts:
    """`DeviceTask.prompts` as a program."""
    return task.prompts(key, num)


@functools.partial(jax.jit, static_argnums=0)
def score_on_device(task: DeviceTask, rollout: Rollout) -> Rewards:
    """`DeviceTask.score` as a program."""
    return task.score(rollout)


@dataclasses.dataclass(frozen=True)
class DeviceLoop:
    """Everything in one program, or, with dynamic sampling, in three; compiles at the first iteration."""

    task: DeviceTask
    config: GRPOConfig
    optimizer: optax.GradientTransformation
    reference: Decoder | None = None

    def iterate(self, run: RunState, step: int, look: Look | None = None) -> tuple[RunState, Iteration]:
        """See `Loop.iterate`."""
        if self.config.dynamic_sampling:
            return self._iterate_with_refills(run, step, look)
        if look is not None:
            look(run.train.model, *self.sample(run, step))
        state, metrics = train_iteration(
            run.train, task=self.task, config=self.config, optimizer=self.optimizer, reference=self.reference
        )
        return dataclasses.replace(run, train=state), Iteration(metrics)

    def _iterate_with_refills(self, run: RunState, step: int, look: Look | None) -> tuple[RunState, Iteration]:
        clock = Clock()
        with clock("rollout"):
            rollout, rewards = self._rolled(run.train, step, 0)
            missing = first_missing = int(num_flat(rollout, rewards))
            refill = 0
            while missing and refill < self.config.max_refills:
                refill += 1
                rollout, rewards, left = refilled(rollout, rewards, *self._rolled(run.train, step, refill))
                missing = int(left)
        if look is not None:
            look(run.train.model, rollout, rewards)
        with clock("update"):
            state, metrics = _updated(self, run.train, rollout, rewards)
            jax.block_until_ready(metrics)
        details = refill_details(first_missing, missing, refill, self.config)
        return dataclasses.replace(run, train=state), Iteration(metrics, details, clock.seconds)

    def sample(self, run: RunState, step: int) -> tuple[Rollout, Rewards]:
        """See `Loop.sample`."""
        return self._rolled(run.train, step, 0)

    def _rolled(self, state: TrainState, step: int, refill: int) -> tuple[Rollout, Rewards]:
        key = refill_key(iteration_keys(state.key, step)[0], refill)
        prompts = make_prompts(self.task, key, self.config.num_prompts)
        rollout = _collected(self, state, prompts, step, refill)
        return rollout, score_on_device(self.task, rollout)


@dataclasses.dataclass(frozen=True)
class HostLoop:
    """Two programs; between them token ids come down and rewards go up. Compiles at the first iteration.

    Attributes:
      task: prompts and rewards.
      config: the iteration.
      optimizer: that of the state.
      reference: as in `train.step.grpo_step`.
      overlap: dispatch the next rollout before the rewards of this one are there; it is then drawn by the policy before
        this iteration's update.
    """

    task: HostTask
    config: GRPOConfig
    optimizer: optax.GradientTransformation
    reference: Decoder | None = None
    overlap: bool = False

    def iterate(self, run: RunState, step: int, look: Look | None = None) -> tuple[RunState, Iteration]:
        """See `Loop.iterate`."""
        clock = Clock()
        with clock("rollout"):
            rollout, entries, run = self._first(run, step)
            completions = completions_of(rollout)
        with clock("reward"), _scoring(self.task) as thread:
            # What processes do together is left to this thread.
            score = functools.partial(self._scored_here, entries, completions)
            waiting = thread.submit(score) if processes.is_first() else None
            if self.overlap:
                ahead, _, cursor = self._drawn(run.train, run.progress.cursor, step + 1)
                progress = dataclasses.replace(run.progress, cursor=cursor, ahead_cursor=run.progress.cursor)
                run = dataclasses.replace(run, progress=progress, ahead=ahead)
            scored = processes.by_the_first(lambda: waiting.result() if waiting is not None else score())
        rewards, details = processes.to_devices(scored.rewards, run.train.model.rules), dict(scored.details)
        if self.config.dynamic_sampling:
            rollout, rewards, run, details = self._refilled(rollout, rewards, run, step, details, clock)
        if look is not None:
            look(run.train.model, rollout, rewards)
        with clock("update"):
            state, metrics = _updated(self, run.train, rollout, rewards)
            jax.block_until_ready(metrics)
        run = dataclasses.replace(run, train=state)
        return run, Iteration(metrics, details, clock.seconds)

    def sample(self, run: RunState, step: int) -> tuple[Rollout, Rewards]:
        """See `Loop.sample`."""
        rollout, entries, _ = self._drawn(run.train, run.progress.cursor, step)
        rewards = self._scored(entries, completions_of(rollout)).rewards
        return rollout, processes.to_devices(rewards, run.train.model.rules)

    def _first(self, run: RunState, step: int) -> tuple[Rollout, list[Any], RunState]:
        """The iteration's rollout: the one drawn ahead, where there is one."""
        if run.ahead is not None:
            _, entries, _ = self.task.draw(run.progress.ahead_cursor, self.config.num_prompts)
            return run.ahead, entries, dataclasses.replace(run, ahead=None)
        rollout, entries, cursor = self._drawn(run.train, run.progress.cursor, step)
        return rollout, entries, run.moved(cursor)

    def _drawn(
        self, state: TrainState, cursor: Cursor, step: int, refill: int = 0
    ) -> tuple[Rollout, list[Any], Cursor]:
        prompts, entries, cursor = self.task.draw(cursor, self.config.num_prompts)
        prompts = processes.to_devices(prompts, state.model.rules)
        return _collected(self, state, prompts, step, refill), entries, cursor

    def _scored(self, entries: list[Any], completions: list[list[int]]) -> Scored:
        return processes.by_the_first(lambda: self._scored_here(entries, completions))

    def _scored_here(self, entries: list[Any], completions: list[list[int]]) -> Scored:
        return self.task.score(entries, completions, self.config.group_size)

    def _refilled(
        self, rollout: Rollout, rewards: Rewards, run: RunState, step: int, details: dict[str, float], clock: Clock
    ) -> tuple[Rollout, Rewards, RunState, dict[str, float]]:
        missing = first_missing = int(num_flat(rollout, rewards))
        refill = 0
        while missing and refill < self.config.max_refills:
            refill += 1
            with clock("rollout"):
                more, entries, cursor = self._drawn(run.train, run.progress.cursor, step, refill)
                completions = completions_of(more)
            with clock("reward"):
                scored = self._scored(entries, completions)
            details = with_counts(details, scored.details)
            more_rewards = processes.to_devices(scored.rewards, run.train.model.rules)
            rollout, rewards, left = refilled(rollout, rewards, more, more_rewards)
            missing, run = int(left), run.moved(cursor)
        return rollout, rewards, run, details | refill_details(first_missing, missing, refill, self.config)


@contextlib.contextmanager
def _scoring(task: HostTask) -> Iterator[ThreadPoolExecutor]:
    """A thread for rewards; where the run ends meanwhile, nobody waits for functions that hang."""
    with ThreadPoolExecutor(1) as thread:
        try:
            yield thread
        except BaseException:
            task.close()
            raise


def _collected(loop: DeviceLoop | HostLoop, state: TrainState, prompts: Prompts, step: int, refill: int) -> Rollout:
    return collect_for_host(
        state,
        prompts,
        config=loop.config,
        vocab_size=loop.task.vocab_size,
        eos_token_ids=loop.task.eos_token_ids,
        key=rollout_key(state.key, step, refill),
    )


def _updated(
    loop: DeviceLoop | HostLoop, state: TrainState, rollout: Rollout, rewards: Rewards
) -> tuple[TrainState, Metrics]:
    return update_from_host(
        state, rollout, rewards, config=loop.config, optimizer=loop.optimizer, reference=loop.reference
    )


def completions_of(rollout: Rollout) -> list[list[int]]:
    """Token ids of each row, once they are there."""
    token_ids, lengths = processes.to_host((rollout.token_ids, rollout.lengths))
    return [row[:length].tolist() for row, length in zip(token_ids, lengths, strict=True)]
