"""Checkpoints of a learner's state: Orbax, one folder a step, whole or not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.state import TrainState


def save(folder: Path, step: int, state: TrainState) -> Path:
    """Writes `folder/step` and returns it; on return it is complete.

    Raises:
      ValueError: that checkpoint exists already.
    """
    path = (folder / str(step)).resolve()
    if path.exists():
        raise ValueError(f"{path} exists already; a checkpoint is never overwritten.")
    with ocp.StandardCheckpointer() as checkpointer:
        # Waited for: the next iteration donates the very buffers that are being written.
        checkpointer.save(path, _named_leaves(state))
        checkpointer.wait_until_finished()
    return path


def latest_step(folder: Path) -> int:
    """The last step with a checkpoint; names that are not a step (Orbax's unfinished writes) are passed over.

    Raises:
      ValueError: there is none.
    """
    steps = [int(path.name) for path in folder.glob("*") if path.is_dir() and path.name.isdigit()]
    if not steps:
        raise ValueError(f"{folder} holds no checkpoint; expected folders named by their step.")
    return max(steps)


def restore(folder: Path, step: int, like: TrainState) -> TrainState:
    """The state saved at `step`.

    Args:
      folder: where checkpoints lie.
      step: which of them.
      like: a state of the same model and optimiser; gives structure and shapes, its values are not used.

    Raises:
      ValueError: the checkpoint is damaged, or belongs to another model or optimiser.
    """
    path = (folder / str(step)).resolve()
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _named_leaves(like))
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(path, wanted)
    except Exception as error:  # Orbax and its storage raise many kinds, and every one of them means the same here
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"checkpoint {path} is damaged or does not fit this run: {reason}") from error
    return _with_leaves(like, found)


def _named_leaves(state: TrainState) -> dict[str, Any]:
    """Leaves by their path, so that a checkpoint does not depend on the classes that held them."""
    raw = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(raw)}


def _with_leaves(like: TrainState, leaves: dict[str, Any]) -> TrainState:
    raw = dataclasses.replace(like, key=jax.random.key_data(like.key))
    restored = jax.tree_util.tree_map_with_path(lambda path, _: leaves[jax.tree_util.keystr(path)], raw)
    return dataclasses.replace(restored, key=jax.random.wrap_key_data(restored.key))
