"""Checkpoints of a learner's state: one folder a step, whole or not there (see `models.arrays`).

With adapters the frozen weights are not written, only a fingerprint of their bits: they are those of the state that is
restored into.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, UInt32

from models import Decoder
from models.arrays import LIST_SUFFIX, read_arrays, write_arrays
from train.partition import partition
from train.state import TrainState

FROZEN = ".frozen"


def save(folder: Path, step: int, state: TrainState) -> Path:
    """Writes `folder/step` and returns it; on return it is complete.

    Raises:
      ValueError: a finished checkpoint of that step exists already.
    """
    return write_arrays(folder / str(step), _named_leaves(state))


def latest_step(folder: Path) -> int:
    """The last step with a finished checkpoint; unfinished ones are passed over.

    Raises:
      ValueError: there is none.
    """
    names = [path.name.removesuffix(LIST_SUFFIX) for path in folder.glob(f"*{LIST_SUFFIX}")]
    steps = [int(name) for name in names if name.isascii() and name.isdigit()]
    if not steps:
        raise ValueError(f"{folder} holds no finished checkpoint; expected STEP{LIST_SUFFIX} beside a folder STEP.")
    return max(steps)


def restore(folder: Path, step: int, like: TrainState) -> TrainState:
    """The state saved at `step`.

    Args:
      folder: where checkpoints lie.
      step: which of them.
      like: a state of the same model and optimiser; gives structure, shapes and frozen weights, its other values are
        not used.

    Raises:
      ValueError: the checkpoint is damaged, or belongs to another model or optimiser; the file or array is named.
    """
    path = (folder / str(step)).resolve()
    leaves = _named_leaves(like)
    try:
        found = read_arrays(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, leaves))
        if FROZEN in leaves and not bool((found[FROZEN] == leaves[FROZEN]).all()):
            raise ValueError("its frozen weights are others")
    except ValueError as error:
        raise ValueError(f"checkpoint {path} is damaged or does not fit this run: {error}") from error
    return _with_leaves(like, found)


def _named_leaves(state: TrainState) -> dict[str, Any]:
    """Leaves by their path, so that a checkpoint does not depend on the classes that held them."""
    trained, frozen = partition(state.model)
    kept = jax.tree_util.tree_leaves_with_path(dataclasses.replace(state, model=trained))
    named = {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in kept}
    return named | {FROZEN: _fingerprint(frozen)} if jax.tree.leaves(frozen) else named


def _with_leaves(like: TrainState, leaves: dict[str, Any]) -> TrainState:
    def restored(path: Any, leaf: Any) -> Any:
        plain = leaves.get(jax.tree_util.keystr(path), leaf)
        return jax.random.wrap_key_data(plain) if _is_key(leaf) else plain

    return jax.tree_util.tree_map_with_path(restored, like)


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
