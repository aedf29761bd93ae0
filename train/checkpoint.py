"""Checkpoints of a learner's state: Orbax, one folder a step, whole or not there."""

from __future__ import annotations

import logging
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
            _check_leaves(_saved_leaves(checkpointer, path), wanted)
            found = checkpointer.restore(path, wanted)
    except Exception as error:  # Orbax and its storage raise many kinds, and every one of them means the same here
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"checkpoint {path} is damaged or does not fit this run: {reason}") from error
    return _with_leaves(like, found)


def _saved_leaves(checkpointer: ocp.StandardCheckpointer, path: Path) -> dict[str, Any]:
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # Orbax warns of unreadable metadata and goes on; it is said here, once
    try:
        metadata = checkpointer.metadata(path).item_metadata
    finally:
        log.setLevel(level)
    if metadata is None:
        raise ValueError("its metadata cannot be read")
    return dict(metadata.tree)


def _check_leaves(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in sorted(found.keys() ^ wanted.keys()):
        raise ValueError(f"it {'holds' if name in found else 'lacks'} an array {name}")
    for name, leaf in wanted.items():
        if tuple(found[name].shape) != leaf.shape:
            raise ValueError(f"array {name} has shape {tuple(found[name].shape)}, not {leaf.shape}")


def _named_leaves(state: TrainState) -> dict[str, Any]:
    """Leaves by their path, so that a checkpoint does not depend on the classes that held them."""
    return {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _with_leaves(like: TrainState, leaves: dict[str, Any]) -> TrainState:
    def restored(path: Any, leaf: Any) -> Any:
        plain = leaves[jax.tree_util.keystr(path)]
        return jax.random.wrap_key_data(plain) if _is_key(leaf) else plain

    return jax.tree_util.tree_map_with_path(restored, like)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
