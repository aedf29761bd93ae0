"""The iterations of a run, with everything that happens between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
from rich.console import Console

from jaxmask import Rollout
from models import Decoder
from train import finishing, processes, samples
from train.build import Built
from train.display import Display
from train.evaluation import evaluate
from train.keeping import Keeper
from train.kept_mass import kept_mass
from train.loop import Iteration
from train.metrics import metrics_row
from train.progress import RunState
from train.run_config import RunConfig
from train.state import learning_rates, with_new_reference
from train.stopping import Stopping
from train.tasks import Rewards
from train.trackers import Trackers

SIGTERM = "SIGTERM"


@dataclasses.dataclass(frozen=True)
class Training:
    """What all iterations of a run share."""

    built: Built
    config: RunConfig
    folder: Path
    rates: optax.Schedule


def train(built: Built, config: RunConfig, folder: Path, console: Console, run: RunState, *, first_step: int) -> None:
    """Iterations `first_step` to the last, unless the run stops early, and then its pictures and policies.

    Args:
      built: loop and task.
      config: the run.
      folder: of the run; it exists.
      console: where progress goes.
      run: the state before iteration `first_step`; its arrays are donated.
      first_step: 0, or that of the checkpoint.

    Raises:
      OSError: the last checkpoint could not be written.
      FloatingPointError: a loss or a gradient is not finite.
    """
    training = Training(built, config, folder, learning_rates(config.grpo, config.iterations))
    title = f"{config.preset} \u2192 {folder}"
    view = Display(console, title, num_iterations=config.iterations, sampling_mask=config.grpo.sampling_mask)
    with (
        Stopping() as stopping,
        Keeper(folder / "checkpoints", config.saving, functools.partial(console.print, soft_wrap=True)) as keeper,
        _tracking(folder, config) as log,
    ):
        reason = None
        with view:
            for step in range(first_step, config.iterations):
                before = run
                run, row = _evaluated(training, run, step)
                is_told = processes.any_of(stopping.is_requested)
                reason = SIGTERM if is_told else run.progress.stops(config.evaluation) if row else None
                if reason is not None:
                    # As it was before the evaluation, which a resumed run then makes again.
                    run = before
                    if not is_told:
                        log(step, row)
                    break
                run, row = _iterated(training, run, step, row)
                log(step, row)
                _check_finite(step, row)
                view.update(step, row)
                if processes.any_of(stopping.is_requested):
                    reason = SIGTERM
                    break
                if (step + 1) % config.saving.checkpoint_every == 0:
                    keeper.save(step + 1, run)
        done = int(run.train.step)
        keeper.save(done, run)
        if reason == SIGTERM:
            keeper.finish()
            console.print(f"stopped by SIGTERM after iteration {done}; --resume {folder} goes on", soft_wrap=True)
            return
        if reason is not None:
            console.print(f"stopped before iteration {done + 1}: {reason}", soft_wrap=True)
        else:
            _, row = _evaluated(training, run, done, is_last=True)
            if row:
                log(done, row)
        # A disk too full for the checkpoint may still have room for the policy.
        finishing.finish(built, config, folder, console, run)
        keeper.finish()


@contextlib.contextmanager
def _tracking(folder: Path, config: RunConfig) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """What takes rows of metrics: the trackers of the first process; in the others they go nowhere."""
    with contextlib.ExitStack() as stack:
        opened: list[Trackers] = []

        def open_all() -> None:
            opened.append(stack.enter_context(Trackers(folder, config.watch.trackers, json.loads(config.to_json()))))

        processes.by_the_first(open_all)
        yield opened[0].log if opened else lambda step, row: None


def _evaluated(training: Training, run: RunState, step: int, is_last: bool = False) -> tuple[RunState, dict[str, Any]]:
    """The run with what an evaluation of the policy before iteration `step` says, where there is one, and its row."""
    evaluation = training.config.evaluation
    if not evaluation.eval_every or (step % evaluation.eval_every and not is_last):
        return run, {}
    started = time.perf_counter()
    found = evaluate(run.train.averaged_model, training.built.task, training.config.grpo, evaluation, run.train.key)
    run = dataclasses.replace(run, progress=run.progress.after_evaluation(found["eval/greedy"]))
    return run, {**found, "time/evaluation": time.perf_counter() - started}


def _iterated(training: Training, run: RunState, step: int, row: dict[str, Any]) -> tuple[RunState, dict[str, Any]]:
    """The run after iteration `step`, and its line of metrics."""
    config, loop = training.config, training.built.loop
    looks = bool(config.watch.sample_every) and step % config.watch.sample_every == 0

    def look(model: Decoder, rollout: Rollout, rewards: Rewards) -> None:
        mass = processes.to_host(kept_mass(model, rollout, config.grpo))
        row["support/kept_mass"] = float(mass)
        rollout, rewards = processes.whole((rollout, rewards))
        if processes.is_first():
            described = samples.describe(rollout, rewards, training.built.task.show, config.watch.num_samples)
            samples.write(training.folder / "samples.jsonl", step, described)

    started = time.perf_counter()
    run, iteration = loop.iterate(run, step, look if looks else None)
    row = {**row, **_measured(iteration, started)}
    row["learning_rate"] = _learning_rate(training, step)
    if config.grpo.reference_every and (step + 1) % config.grpo.reference_every == 0:
        run = dataclasses.replace(run, train=with_new_reference(run.train))
    return run, row


def _measured(iteration: Iteration, started: float) -> dict[str, Any]:
    row = metrics_row(processes.to_host(iteration.metrics))
    # Only now: until its figures are there, an iteration of the device is no more than dispatched.
    seconds = time.perf_counter() - started
    times = {f"time/{name}": value for name, value in iteration.seconds.items()}
    speed = {"seconds": seconds, "tokens_per_second": row["completions/num_tokens"] / seconds}
    return {**row, **iteration.details, **times, **speed}


def _check_finite(step: int, row: dict[str, Any]) -> None:
    """Ends a run whose weights are lost before its checkpoints take the places of the good ones."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(row[name]):
            raise FloatingPointError(f"{name} of iteration {step} is {row[name]}; nothing of it is saved.")


def _learning_rate(training: Training, step: int) -> float:
    """Of the iteration's first update."""
    with jax.numpy_dtype_promotion("standard"):
        return float(training.rates(step * training.config.grpo.num_updates))
