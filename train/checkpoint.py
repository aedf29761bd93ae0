"""Checkpoints of a run: one folder a step, whole or not there (see `models.arrays`), written while the run goes on.

    checkpoints/run.json             the run that writes here, by a name of its own
    checkpoints/200/                 arrays, written by Orbax
    checkpoints/200.run.json         the run that wrote it
    checkpoints/200.files.json       size and checksum of each file; written last

With adapters the frozen weights are not written, only a fingerprint of their bits: they are those of the state that is
restored into. What lies in the folder and was not written by this run is never deleted: not what is unfinished, not
what is damaged, not what was copied there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, UInt32

from models import Decoder
from models.arrays import LIST_SUFFIX, free_name, read_arrays, write_arrays
from train import processes
from train.partition import partition
from train.progress import Progress, RunState
from train.state import TrainState
from train.tasks.base import Cursor

RUN_SUFFIX = ".run.json"
FROZEN = ".frozen"


def save(folder: Path, step: int, run: RunState, run_id: str = "") -> Path:
    """Writes `folder/step` and returns it; on return it is complete.

    Args:
      folder: where checkpoints lie.
      step: iterations done.
      run: what a resumed run needs.
      run_id: name of the run, which says who may delete the checkpoint.

    Raises:
      ValueError: a finished checkpoint of that step exists already.
    """
    return write(folder, step, named_leaves(run), run_id)


def write(folder: Path, step: int, leaves: dict[str, Any], run_id: str) -> Path:
    """As `save`, from the leaves of `named_leaves`."""
    return write_arrays(folder / str(step), leaves, {f"{step}{RUN_SUFFIX}": run_id})


def finished_steps(folder: Path) -> list[int]:
    """Steps with a finished checkpoint, ascending; unfinished ones are passed over."""
    names = [path.name.removesuffix(LIST_SUFFIX) for path in folder.glob(f"*{LIST_SUFFIX}")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def incomplete(folder: Path) -> list[Path]:
    """Folders of steps without a finished checkpoint: begun and never ended, or copied without their lists."""
    steps = finished_steps(folder)
    folders = [path for path in sorted(folder.glob("*")) if path.is_dir()]
    return [path for path in folders if path.name.isascii() and path.name.isdigit() and int(path.name) not in steps]


def latest_step(folder: Path) -> int:
    """The last step with a finished checkpoint; unfinished ones are passed over.

    Raises:
      ValueError: there is none.
    """
    steps = finished_steps(folder)
    if not steps:
        raise ValueError(f"{folder} holds no finished checkpoint; expected STEP{LIST_SUFFIX} beside a folder STEP.")
    return steps[-1]


def restore_latest(folder: Path, like: RunState, say: Callable[[str], None]) -> tuple[int, RunState]:
    """The last step whose checkpoint is whole, and what it holds.

    Later ones that are damaged are set aside under another name, so that the run can write these steps again; `say` is
    told of each.

    Args:
      folder: where checkpoints lie.
      like: see `restore`.
      say: takes a line for people.

    Raises:
      ValueError: there is none, or none can be read; the newest one's reason is named.
    """
    processes.by_the_first(lambda: latest_step(folder))
    steps = processes.by_the_first(lambda: finished_steps(folder))
    errors: list[tuple[int, ValueError]] = []
    for step in reversed(steps):
        try:
            run = restore(folder, step, like)
        except ValueError as error:
            errors.append((step, error))
        else:
            for damaged, reason in errors:
                aside = processes.by_the_first(functools.partial(_set_aside, folder, damaged))
                say(f"{reason}; it is set aside as {aside.name}, and step {step} is used")
            return step, run
    raise errors[0][1]


def restore(folder: Path, step: int, like: RunState) -> RunState:
    """The run saved at `step`.

    Args:
      folder: where checkpoints lie.
      step: which of them.
      like: of the same model and optimiser; gives structure, shapes, shardings and frozen weights, its other values
        are not used. The mesh may be another one than that of the run that saved.

    Raises:
      ValueError: the checkpoint is damaged, or belongs to another model or optimiser; the file or array is named.
    """
    path = (folder / str(step)).resolve()
    leaves = named_leaves(like)
    try:
        found = read_arrays(path, jax.tree.map(_described, leaves))
        if FROZEN in leaves and not bool((found[FROZEN] == leaves[FROZEN]).all()):
            raise ValueError("its frozen weights are others")
    except ValueError as error:
        raise ValueError(f"checkpoint {path} is damaged or does not fit this run: {error}") from error
    return _with_leaves(like, found)


def named_leaves(run: RunState) -> dict[str, Any]:
    """Leaves by their path, so that a checkpoint does not depend on the classes that held them."""
    trained, frozen = partition(run.train.model)
    kept = jax.tree_util.tree_leaves_with_path(dataclasses.replace(run.train, model=trained))
    named = {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in kept}
    ahead = {
        f".ahead{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(run.ahead)
    }
    fingerprint = {FROZEN: _fingerprint(frozen)} if jax.tree.leaves(frozen) else {}
    return named | ahead | _of_progress(run.progress) | fingerprint


def _of_progress(progress: Progress) -> dict[str, Any]:
    cursors = (progress.cursor, progress.ahead_cursor)
    places = [place for cursor in cursors for place in (cursor.epoch, cursor.position)]
    return {
        ".progress.places": np.array([*places, progress.num_without_gain], np.int32),
        ".progress.best": np.array([progress.best], np.float32),
    }


def _to_progress(leaves: dict[str, Any]) -> Progress:
    epoch, position, ahead_epoch, ahead_position, num_without_gain = np.asarray(leaves[".progress.places"]).tolist()
    best = float(np.asarray(leaves[".progress.best"])[0])
    return Progress(Cursor(epoch, position), Cursor(ahead_epoch, ahead_position), best, num_without_gain)


def _with_leaves(like: RunState, leaves: dict[str, Any]) -> RunState:
    def restored(path: Any, leaf: Any) -> Any:
        plain = leaves.get(jax.tree_util.keystr(path), leaf)
        return jax.random.wrap_key_data(plain) if _is_key(leaf) else plain

    def restored_ahead(path: Any, leaf: Any) -> Any:
        return leaves[f".ahead{jax.tree_util.keystr(path)}"]

    train: TrainState = jax.tree_util.tree_map_with_path(restored, like.train)
    return RunState(train, _to_progress(leaves), jax.tree_util.tree_map_with_path(restored_ahead, like.ahead))


def _set_aside(folder: Path, step: int) -> Path:
    aside = free_name(folder / str(step), "damaged")
    for suffix in ("", RUN_SUFFIX, LIST_SUFFIX):
        path = folder / f"{step}{suffix}"
        if path.exists():
            path.rename(aside.with_name(aside.name + suffix))
    return aside


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else ocp.utils.to_shape_dtype_struct(leaf)


@jax.jit
def _fingerprint(frozen: Decoder) -> UInt32[Array, " N"]:
    """The bits of each weight added up: the same on every mesh, since integers add in any order."""

    def add_up(leaf: Array) -> UInt32[Array, ""]:
        width = jnp.dtype(leaf.dtype).itemsize * 8
        return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}")).astype(jnp.uint32).sum()

    return jnp.stack([add_up(leaf) for leaf in jax.tree.leaves(frozen)])


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
