"""A run from its configuration to its folder: config, metrics, samples, curves, checkpoints.

config.json  metrics.jsonl  samples.jsonl  curves.png  checkpoints/<step>/  adapters/ (of a run that trains these)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from models import lora
from models.files import write_whole
from train import checkpoint, report, samples
from train.build import build
from train.config import RunConfig
from train.display import Display
from train.loop import Loop
from train.metrics import metrics_row
from train.state import TrainState
from train.tasks import DeviceTask, HostTask

NUM_SAMPLES = 5
RUNS = Path("runs")


def start(config: RunConfig, folder: Path | None, console: Console) -> Path:
    """Trains from the beginning, into a folder that is new or empty, and returns it.

    Args:
      config: the run.
      folder: where it goes, or None for a new one under `RUNS`.
      console: where progress goes.

    Raises:
      ValueError: the folder holds something, or the model or task cannot be made.
    """
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; a run never writes over another. Give a new --out, or --resume it.")
    loop, task, state = build(config)
    # Only now, so that a run that cannot be made leaves nothing behind.
    folder = new_folder(RUNS, config.preset) if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / "config.json").open("x", encoding="utf-8") as file:
            file.write(config.to_json())
    except FileExistsError:
        raise ValueError(f"{folder} was taken by another run just now; give a new --out.") from None
    with _says_how_to_go_on(folder):
        _train(config, folder, console, loop, task, state, first_step=0)
    return folder


def resume(folder: Path, iterations: int | None, console: Console) -> None:
    """Continues a run from its last checkpoint, as the unbroken run would have gone on.

    Args:
      folder: of the run.
      iterations: new total, which the run keeps from then on, or None for its own. A cosine schedule then ends there.
      console: where progress goes.

    Raises:
      ValueError: no run there, no usable checkpoint, or nothing left to do.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{folder} holds no run: {config_path} is missing.")
    try:
        config = RunConfig.from_json(config_path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config_path} is damaged: {error}") from error
    if iterations is not None:
        config = dataclasses.replace(config, iterations=iterations)
    step = checkpoint.latest_step(folder / "checkpoints")
    if step >= config.iterations:
        raise ValueError(f"{folder} has done {step} of {config.iterations} iterations; give a larger --iterations.")
    loop, task, state = build(config)
    state = checkpoint.restore(folder / "checkpoints", step, state)
    if iterations is not None:
        write_whole(config_path, config.to_json())
    console.print(f"resuming {folder} after iteration {step}")
    with _says_how_to_go_on(folder):
        _train(config, folder, console, loop, task, state, first_step=step)


@contextlib.contextmanager
def _says_how_to_go_on(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        try:
            step = checkpoint.latest_step(folder / "checkpoints")
        except ValueError:
            raise KeyboardInterrupt(f" before the first checkpoint of {folder}") from None
        raise KeyboardInterrupt(f"; --resume {folder} goes on after iteration {step}") from None


def new_folder(root: Path, name: str) -> Path:
    """Makes the first of root/name-001, root/name-002, ... that does not exist, so that no other run can take it."""
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = root / f"{name}-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _train(
    config: RunConfig,
    folder: Path,
    console: Console,
    loop: Loop,
    task: DeviceTask | HostTask,
    state: TrainState,
    first_step: int,
) -> None:
    metrics_path, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    title = f"{config.preset} \u2192 {folder}"
    view = Display(
        console,
        title,
        num_iterations=config.iterations,
        sampling_mask=config.grpo.sampling_mask,
    )
    report.end_last_line(metrics_path)
    with metrics_path.open("a", encoding="utf-8") as file, view:
        for step in range(first_step, config.iterations):
            state, row = _timed(loop, state, step)
            file.write(json.dumps(row) + "\n")
            file.flush()
            view.update(step, row)
            done = step + 1
            if done % config.checkpoint_every == 0 or done == config.iterations:
                checkpoint.save(checkpoints, done, state)
    _finish(config, folder, console, loop, task, state)


def _timed(loop: Loop, state: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
    """The state after one iteration, and its line of metrics."""
    started = time.perf_counter()
    state, metrics = loop.iterate(state, step)
    row: dict[str, Any] = {"step": step} | metrics_row(metrics)
    seconds = time.perf_counter() - started
    return state, row | {"seconds": seconds, "tokens_per_second": row["completions/num_tokens"] / seconds}


def _finish(
    config: RunConfig,
    folder: Path,
    console: Console,
    loop: Loop,
    task: DeviceTask | HostTask,
    state: TrainState,
) -> None:
    rows = report.read_metrics(folder / "metrics.jsonl")
    scored = "recorded supports" if config.grpo.sampling_mask else "full vocabulary, sampling mask off"
    report.plot_curves(rows, folder / "curves.png", f"{config.preset}: policy scored on the {scored}")
    rollout, rewards = loop.sample(state, config.iterations)
    described = samples.describe(rollout, rewards, task.show, NUM_SAMPLES)
    samples.write(folder / "samples.jsonl", config.iterations, described)
    last = rows[-10:]
    worst = max(row["ratio/max_error"] for row in rows)
    console.print(samples.table(described, task.show))
    console.print(
        f"last {len(last)} iterations: reward {_mean(last, 'rewards/mean'):.3f}, "
        f"exact answers {_mean(last, 'rewards/exact'):.1%}"
    )
    console.print(
        f"largest |ratio - 1| on the first pass of {len(rows)} iterations: {worst:.1e} ({scored})", soft_wrap=True
    )
    console.print(f"curves      {folder / 'curves.png'}", soft_wrap=True)
    console.print(f"samples     {folder / 'samples.jsonl'}", soft_wrap=True)
    console.print(f"checkpoint  {folder / 'checkpoints' / str(config.iterations)}", soft_wrap=True)
    if config.lora is not None:
        lora.save(state.model, folder / "adapters", None if config.model == "tiny" else config.model)
        console.print(f"adapters    {folder / 'adapters'}", soft_wrap=True)


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
