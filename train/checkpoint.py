"""Checkpoints of a learner's state: Orbax, one folder a step, whole or not there.

    checkpoints/200/            written by Orbax
    checkpoints/200.files.json  size and CRC-32 of each file in it; written last, so a step without it is unfinished

The list is checked before anything is read: Orbax reads in threads that outlive an error and go on complaining.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.state import TrainState

_SUFFIX = ".files.json"


def save(folder: Path, step: int, state: TrainState) -> Path:
    """Writes `folder/step` and returns it; on return it is complete.

    Raises:
      ValueError: a finished checkpoint of that step exists already.
    """
    path = (folder / str(step)).resolve()
    if path.with_name(path.name + _SUFFIX).exists():
        raise ValueError(f"{path} exists already; a checkpoint is never overwritten.")
    if path.exists():
        # A run was killed between the folder and its list: set aside, since nobody can tell what it holds.
        path.rename(_free_name(path))
    with ocp.StandardCheckpointer() as checkpointer:
        # Waited for: the next iteration donates the very buffers that are being written.
        checkpointer.save(path, _named_leaves(state))
        checkpointer.wait_until_finished()
    write_whole(path.with_name(path.name + _SUFFIX), json.dumps(_list_files(path), indent=1))
    return path


def write_whole(path: Path, text: str) -> None:
    """Writes a file that, whenever the process dies, holds all of the text or what it held before."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def latest_step(folder: Path) -> int:
    """The last step with a finished checkpoint; unfinished ones are passed over.

    Raises:
      ValueError: there is none.
    """
    names = [path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")]
    steps = [int(name) for name in names if name.isascii() and name.isdigit()]
    if not steps:
        raise ValueError(f"{folder} holds no finished checkpoint; expected STEP{_SUFFIX} beside a folder STEP.")
    return max(steps)


def restore(folder: Path, step: int, like: TrainState) -> TrainState:
    """The state saved at `step`.

    Args:
      folder: where checkpoints lie.
      step: which of them.
      like: a state of the same model and optimiser; gives structure and shapes, its values are not used.

    Raises:
      ValueError: the checkpoint is damaged, or belongs to another model or optimiser; the file or array is named.
    """
    path = (folder / str(step)).resolve()
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _named_leaves(like))
    try:
        _check_files(path)
        with ocp.StandardCheckpointer() as checkpointer:
            _check_leaves(dict(checkpointer.metadata(path).item_metadata.tree), wanted)
            found = checkpointer.restore(path, wanted)
    except Exception as error:  # Orbax and its storage raise many kinds, and every one of them means the same here
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"checkpoint {path} is damaged or does not fit this run: {reason}") from error
    return _with_leaves(like, found)


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.name}.unfinished-{number}")).exists():
        number += 1
    return name


def _list_files(path: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file under `path`."""
    listed = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            listed[file.relative_to(path).as_posix()] = (file.stat().st_size, _checksum(file))
    return listed


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _check_files(path: Path) -> None:
    listed = json.loads(path.with_name(path.name + _SUFFIX).read_text(encoding="utf-8"))
    for name, (size, checksum) in listed.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"file {name} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"file {name} has {file.stat().st_size} bytes, not {size}")
        if _checksum(file) != checksum:
            raise ValueError(f"file {name} does not have its checksum")


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
