"""What a run leaves at its end: pictures, samples, and what was trained in the forms that others read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import models
from models import lora
from models.files import read_json_if_present, write_whole
from train import processes, report, report_html, samples
from train.build import Built
from train.progress import RunState
from train.run_config import RunConfig

# Written last: says that nothing is missing.
ENDED = "ended.json"


def finish(built: Built, config: RunConfig, folder: Path, console: Console, run: RunState) -> None:
    """Writes curves, samples, report and policies, and says where they are and how the run went.

    Args:
      built: loop and task.
      config: the run.
      folder: of the run, with the metrics of its iterations.
      console: takes the summary.
      run: the state after the last iteration.
    """
    step = int(run.train.step)
    rollout, rewards = processes.whole(built.loop.sample(run, step))

    def show() -> None:
        described = samples.describe(rollout, rewards, built.task.show, config.watch.num_samples)
        samples.write(folder / "samples.jsonl", step, described)
        rows = report.read_metrics(folder / "metrics.jsonl")
        _pictures(rows, config, folder, console)
        console.print(samples.table(described, built.task.show))
        _summary(rows, config, console)
        console.print(f"checkpoint  {folder / 'checkpoints' / str(step)}", soft_wrap=True)

    processes.by_the_first(show)
    _policies(built, config, folder, console, run)
    processes.by_the_first(lambda: write_whole(folder / ENDED, json.dumps({"step": step}) + "\n"))


def has_ended(folder: Path, step: int) -> bool:
    """Whether a run has left all that it leaves at its end after `step` iterations.

    Raises:
      ValueError: the file that says so is damaged.
    """
    return read_json_if_present(folder / ENDED).get("step") == step


def draw(folder: Path, console: Console) -> None:
    """Draws the pictures of a run anew, also of one that is still going on.

    Raises:
      ValueError: no run there, or none that has done an iteration.
    """
    if not (folder / "config.json").is_file() or not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} holds no run with metrics: config.json or metrics.jsonl is missing.")
    config = RunConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
    _pictures(report.read_metrics(folder / "metrics.jsonl"), config, folder, console)


def _scored(config: RunConfig) -> str:
    return "recorded supports" if config.grpo.sampling_mask else "full vocabulary, sampling mask off"


def _trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of iterations: one may hold nothing but the last evaluation."""
    return [row for row in rows if "rewards/mean" in row]


def _pictures(rows: list[dict[str, Any]], config: RunConfig, folder: Path, console: Console) -> None:
    trained = _trained(rows)
    if not trained:
        raise ValueError(f"{folder} has done no iteration yet: {folder / 'metrics.jsonl'} holds none.")
    report.plot_curves(trained, folder / "curves.png", f"{config.preset}: policy scored on the {_scored(config)}")
    page = report_html.write_report(folder)
    console.print(f"curves      {folder / 'curves.png'}", soft_wrap=True)
    console.print(f"report      {page}", soft_wrap=True)


def _summary(rows: list[dict[str, Any]], config: RunConfig, console: Console) -> None:
    trained = _trained(rows)
    last = trained[-10:]
    console.print(
        f"last {len(last)} iterations: reward {_mean(last, 'rewards/mean'):.3f}, "
        f"exact answers {_mean(last, 'rewards/exact'):.1%}"
    )
    evaluated = [row["eval/greedy"] for row in rows if "eval/greedy" in row]
    if evaluated:
        console.print(
            f"held-out prompts answered right, greedily: {evaluated[0]:.1%} at first, {evaluated[-1]:.1%} now"
        )
    worst = max(row["ratio/max_error"] for row in trained)
    console.print(
        f"largest |ratio - 1| on the first pass of {len(trained)} iterations: {worst:.1e} ({_scored(config)})",
        soft_wrap=True,
    )


def _policies(built: Built, config: RunConfig, folder: Path, console: Console, run: RunState) -> None:
    """The adapters of a run that trained these, or the whole policy of one that began with a model of the hub's kind.

    Each goes into a folder named after the iterations done, which an extended run leaves behind.
    """
    step, model, average = int(run.train.step), run.train.model, run.train.averaged_model
    if config.lora is not None:
        base = None if config.model == "tiny" else config.model

        def save_adapters(whole: models.Decoder, path: Path) -> None:
            lora.save(whole, path, base)

        _once(folder / f"adapters-{step}", console, model, save_adapters)
        if run.train.average is not None:
            _once(folder / f"average-{step}", console, average, save_adapters)
    elif config.saving.export_policy and built.tokenizer is not None:

        def save_policy(whole: models.Decoder, path: Path) -> None:
            models.save(whole, path, built.tokenizer)

        _once(folder / f"policy-{step}", console, model, save_policy)
        if run.train.average is not None:
            _once(folder / f"average-{step}", console, average, save_policy)


def _once(path: Path, console: Console, model: models.Decoder, save: Callable[[models.Decoder, Path], None]) -> None:
    if not processes.by_the_first(path.exists):
        # Of one process, the devices hold all of it, and it goes to the disk piece by piece.
        whole = model if jax.process_count() == 1 else processes.to_the_first(model)

        def write() -> None:
            if whole is not None:
                save(whole, path)

        processes.by_the_first(write)
    console.print(f"{path.name.rpartition('-')[0]:<11} {path}", soft_wrap=True)


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
