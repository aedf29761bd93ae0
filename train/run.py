"""A run from its configuration to its folder, from the beginning or from its last checkpoint.

config.json     what it is                        metrics.jsonl   a line an iteration
samples.jsonl   completions with their supports   checkpoints/    see `train.checkpoint`
curves.png  report.html                           pictures, at the end
policy-N/  average-N/  adapters-N/   what was trained, at the end (see `train.finishing`)
ended.json      that nothing of it is missing
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from models.files import write_whole
from train import checkpoint, finishing, processes, trackers
from train.build import Built, build, with_ahead
from train.loop import HostLoop
from train.progress import RunState
from train.run_config import RunConfig
from train.training import train

RUNS = Path("runs")


def start(config: RunConfig, folder: Path | None, console: Console) -> Path:
    """Trains from the beginning, into a folder that is new or empty, and returns it.

    Args:
      config: the run.
      folder: where it goes, or None for a new one under `RUNS`.
      console: where progress goes.

    Raises:
      ValueError: the folder holds something, the model or task cannot be made, or a tracker is not installed.
    """
    processes.by_the_first(lambda: _check_free(folder))
    processes.by_the_first(lambda: trackers.check(config.watch.trackers))
    built = build(config)
    with closing(built):
        # Only now, so that a run that cannot be made leaves nothing behind.
        folder = Path(processes.by_the_first(lambda: str(_made(folder, config))))
        with _says_how_to_go_on(folder):
            train(built, config, folder, console, built.run, first_step=0)
    return folder


def resume(folder: Path, iterations: int | None, console: Console, mesh: str | None = None) -> None:
    """Continues a run from its last checkpoint, or from its beginning where it has none, as the unbroken run would.

    Args:
      folder: of the run.
      iterations: new total, which the run keeps from then on, or None for its own. A falling learning rate then ends
        there.
      console: where progress goes.
      mesh: another mesh, which the run keeps from then on, or None for its own. On the same one, what follows is the
        unbroken run bit for bit.

    Raises:
      ValueError: no run there, checkpoints of which none can be read, or nothing left to do.
    """
    config = processes.by_the_first(lambda: _read_config(folder))
    config = dataclasses.replace(
        config,
        iterations=config.iterations if iterations is None else iterations,
        mesh=config.mesh if mesh is None else mesh,
    )
    step = processes.by_the_first(lambda: max(checkpoint.finished_steps(folder / "checkpoints"), default=0))
    # One that was ended between its last checkpoint and its policies still has these to leave.
    has_ended = processes.by_the_first(lambda: finishing.has_ended(folder, step))
    if step > config.iterations or (step == config.iterations and has_ended):
        raise ValueError(f"{folder} has done {step} of {config.iterations} iterations; give a larger --iterations.")
    built = build(config)
    with closing(built):
        run = built.run
        for path in processes.by_the_first(lambda: checkpoint.incomplete(folder / "checkpoints")):
            console.print(f"checkpoint {path} is incomplete, and is passed over", soft_wrap=True, highlight=False)
        if step:
            step, run = _restored(folder, built, config, console)
        if processes.is_first() and (iterations is not None or mesh is not None):
            write_whole(folder / "config.json", config.to_json())
        where = f"after iteration {step}" if step else "from its beginning, since it has no finished checkpoint"
        console.print(f"resuming {folder} {where}", soft_wrap=True)
        with _says_how_to_go_on(folder):
            train(built, config, folder, console, run, first_step=step)


@contextlib.contextmanager
def closing(built: Built) -> Iterator[None]:
    """Ends the worker processes of a task of the host, however the run ends."""
    try:
        yield
    finally:
        if isinstance(built.loop, HostLoop):
            built.loop.task.close()


def _restored(folder: Path, built: Built, config: RunConfig, console: Console) -> tuple[int, RunState]:
    like = built.run
    # The first checkpoint of such a run, too, follows an iteration that drew ahead.
    if config.overlap and isinstance(built.loop, HostLoop):
        like = with_ahead(like, built.loop.task, config)
    return checkpoint.restore_latest(
        folder / "checkpoints", like, lambda line: console.print(line, soft_wrap=True, highlight=False)
    )


def _read_config(folder: Path) -> RunConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no run: {path} is missing.")
    try:
        return RunConfig.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _check_free(folder: Path | None) -> None:
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; a run never writes over another. Give a new --out, or --resume it.")


def _made(folder: Path | None, config: RunConfig) -> Path:
    """The run's folder with its configuration in it."""
    folder = new_folder(RUNS, config.preset) if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / "config.json").open("x", encoding="utf-8") as file:
            file.write(config.to_json())
    except FileExistsError:
        raise ValueError(f"{folder} was taken by another run just now; give a new --out.") from None
    return folder


@contextlib.contextmanager
def _says_how_to_go_on(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        try:
            step = checkpoint.latest_step(folder / "checkpoints")
        except ValueError:
            raise KeyboardInterrupt(f"; --resume {folder} goes on from its beginning, it has no checkpoint") from None
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
