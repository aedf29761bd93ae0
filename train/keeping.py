"""Checkpoints written in the background while the run goes on, and old ones cleared away by policy."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from models.arrays import LIST_SUFFIX
from models.files import read_json, read_json_if_present, write_whole
from train import processes
from train.checkpoint import RUN_SUFFIX, finished_steps, named_leaves, write
from train.progress import RunState
from train.run_config import SavingConfig

RUN_FILE = "run.json"
DELETING_SUFFIX = ".deleting.json"


class Keeper:
    """Writes the checkpoints of one run, one at a time, and keeps those that the config says.

    With several processes all of them save together, and `save` returns when the checkpoint is complete: Orbax waits
    for every process, and no array is whole on one host.

    Use as a context manager: on leaving it, what was begun is complete.
    """

    def __init__(self, folder: Path, saving: SavingConfig, say: Callable[[str], None]):
        """Into `folder`; `say` takes lines for people."""
        self._folder, self._saving, self._say = folder, saving, say
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._run_id = processes.by_the_first(lambda: _begun(folder))

    def __enter__(self) -> Keeper:
        """Nothing to do."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for what is being written."""
        self._wait()

    def save(self, step: int, run: RunState) -> None:
        """Begins to write a checkpoint of `run`, whose arrays may be donated as soon as this returns.

        A checkpoint that cannot be written (a full disk) is told of, and the run goes on with those it has.
        """
        self._wait()
        if processes.by_the_first(lambda: step in finished_steps(self._folder)):
            if not processes.by_the_first(lambda: self._is_own(step)):
                self._failure = FileExistsError(
                    f"{self._folder / str(step)} is another run's, and is never overwritten"
                )
                self._tell()
            return
        if jax.process_count() > 1:
            self._write(step, named_leaves(run))
            self._tell()
            return
        leaves = jax.tree.map(_own, named_leaves(run))
        self._writing = threading.Thread(target=self._write, args=(step, leaves))
        self._writing.start()

    def finish(self) -> None:
        """Waits for what is being written.

        Raises:
          OSError: the last checkpoint could not be written; the reason is named.
        """
        self._wait()
        if self._failure is not None:
            raise OSError(f"the last checkpoint could not be written: {self._failure}") from self._failure

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None
            self._tell()

    def _tell(self) -> None:
        if self._failure is not None:
            self._say(f"a checkpoint could not be written: {self._failure}")

    def _write(self, step: int, leaves: dict[str, Any]) -> None:
        try:
            write(self._folder, step, leaves, self._run_id)
            self._failure = None
            processes.by_the_first(self._clear)
        except Exception as error:  # whatever it is, the run must not end by it
            self._failure = error

    def _clear(self) -> None:
        """Deletes the checkpoints of this run that are neither among the newest nor kept for good."""
        own = [step for step in finished_steps(self._folder) if self._is_own(step)]
        for step in own[: -self._saving.keep_last]:
            if self._saving.keep_every and step % self._saving.keep_every == 0:
                continue
            listed = self._folder / f"{step}{LIST_SUFFIX}"
            _finish_deleting(listed.rename(self._folder / f"{step}{DELETING_SUFFIX}"))

    def _is_own(self, step: int) -> bool:
        path = self._folder / f"{step}{RUN_SUFFIX}"
        return path.is_file() and path.read_text(encoding="utf-8") == self._run_id


def _begun(folder: Path) -> str:
    """`_run_id`, in a folder that is there and in which no deletion is left half done."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"*{DELETING_SUFFIX}"):
        _finish_deleting(path)
    return _run_id(folder)


def _run_id(folder: Path) -> str:
    """The name of the run that writes here; made at its start."""
    path = folder / RUN_FILE
    known = read_json_if_present(path).get("run")
    if known is None:
        known = uuid.uuid4().hex
        write_whole(path, json.dumps({"run": known}) + "\n")
    return str(known)


def _finish_deleting(listed: Path) -> None:
    """Deletes the files of a list, then the folders that are empty, then the list.

    A kill in between is made good by the next start; files that are not in the list stay.
    """
    folder = listed.with_name(listed.name.removesuffix(DELETING_SUFFIX))
    try:
        names = read_json(listed)
    except ValueError:
        # Damaged: nobody can tell what was written, so all of it stays.
        return
    for name in names:
        # "../200.run.json" lies beside the folder, which may be gone.
        beside = name.startswith("../")
        path = folder.with_name(name.removeprefix("../")) if beside else folder / name
        path.unlink(missing_ok=True)
    folders = [path for path in folder.rglob("*") if path.is_dir()] if folder.is_dir() else []
    for path in (*sorted(folders, reverse=True), folder):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    listed.unlink()


def _own(leaf: Any) -> np.ndarray:
    """A copy on the host: NumPy's view of an array on a CPU is the very buffer that the next iteration donates."""
    return np.array(leaf)
