"""Named arrays as Orbax folders, whole or not there.

With several processes all of them call the functions here: each writes and reads the pieces that it holds, and the
first one does the rest. The folder must be the same for all: a shared file system.

    200/            written by Orbax
    200.files.json  size and CRC-32 of each file in it; written last, so a folder without it is unfinished

The list is checked before anything is read: Orbax reads in threads that outlive an error and go on complaining.
"""

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from models.files import write_whole
from models.processes import by_the_first, in_all

LIST_SUFFIX = ".files.json"
ORBAX_SUFFIX = ".orbax-checkpoint-tmp"


def write_arrays(
    path: Path, arrays: Mapping[str, jax.Array | np.ndarray], beside: Mapping[str, str] | None = None
) -> Path:
    """Writes the folder `path` and returns it; on return it is complete.

    Args:
      path: the folder.
      arrays: by name; NumPy ones are written as they are at the time, and must not change before the return.
      beside: texts of files next to the folder, which its list covers too.

    Raises:
      ValueError: it is there already, finished.
      Exception: what Orbax and its storage raise; what was begun is removed again.
    """
    path = path.resolve()
    by_the_first(lambda: _make_room(path))
    try:
        in_all(lambda: _write(path, arrays))
        by_the_first(lambda: _complete(path, beside or {}))
    except Exception:
        by_the_first(lambda: _remove_begun(path))
        raise
    return path


def read_arrays(
    path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], keep_dtypes: bool = False
) -> dict[str, jax.Array]:
    """The arrays that `write_arrays` wrote, each read straight to where it is wanted.

    Args:
      path: the folder.
      wanted: shape, dtype and sharding of each array.
      keep_dtypes: arrays have the dtypes they were stored in, not the wanted ones.

    Raises:
      ValueError: a file is damaged or missing, there are other arrays than wanted, or one has another shape.
    """
    path = path.resolve()
    by_the_first(lambda: _check_files(path))
    try:
        return in_all(lambda: _read(path, wanted, keep_dtypes))
    except Exception as error:  # Orbax and its storage raise many kinds, and every one of them means the same here
        raise _in_one_line(error) from error


def _write(path: Path, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        # Waited for: whoever trains donates the very buffers that are being written.
        checkpointer.save(path, dict(arrays))
        checkpointer.wait_until_finished()


def _read(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], keep_dtypes: bool) -> dict[str, jax.Array]:
    with ocp.StandardCheckpointer() as checkpointer:
        stored = dict(checkpointer.metadata(path).item_metadata.tree)
        _check_shapes(stored, wanted)
        kept = {name: leaf.update(dtype=stored[name].dtype) for name, leaf in wanted.items()}
        return checkpointer.restore(path, kept if keep_dtypes else dict(wanted))


def _in_one_line(error: Exception) -> ValueError:
    return ValueError(" ".join(str(error).split())[:200])


def _make_room(path: Path) -> None:
    if path.with_name(path.name + LIST_SUFFIX).exists():
        raise ValueError(f"{path} exists already; a checkpoint is never overwritten.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A process was killed before the list was there, or somebody copied a part: set aside, since nobody can tell what
    # it holds. Orbax would delete the second one, which bears the name of its own beginnings.
    for begun in (path, path.with_name(path.name + ORBAX_SUFFIX)):
        if begun.exists():
            begun.rename(free_name(path, "unfinished"))


def _remove_begun(path: Path) -> None:
    """What a failed write leaves: all of it was made by us just now, and on a full disk the next one needs its room."""
    for begun in (path, path.with_name(path.name + ORBAX_SUFFIX)):
        shutil.rmtree(begun, ignore_errors=True)


def _complete(path: Path, beside: Mapping[str, str]) -> None:
    files = _list_files(path)
    for name, text in beside.items():
        write_whole(path.with_name(name), text)
        files[f"../{name}"] = _described(path.with_name(name))
    write_whole(path.with_name(path.name + LIST_SUFFIX), json.dumps(files, indent=1))


def free_name(path: Path, reason: str) -> Path:
    """The first of NAME.reason-1, NAME.reason-2, ... that is not there yet, beside `path`."""
    number = 1
    while (name := path.with_name(f"{path.name}.{reason}-{number}")).exists():
        number += 1
    return name


def _list_files(path: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file under `path`."""
    listed = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            listed[file.relative_to(path).as_posix()] = _described(file)
    return listed


def _described(file: Path) -> tuple[int, int]:
    return file.stat().st_size, _checksum(file)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _check_files(path: Path) -> None:
    try:
        listed = json.loads(path.with_name(path.name + LIST_SUFFIX).read_text(encoding="utf-8"))
        _check_listed(path, listed)
    except Exception as error:  # a damaged list may hold anything
        raise _in_one_line(error) from error


def _check_listed(path: Path, listed: Mapping[str, list[int]]) -> None:
    for name, (size, checksum) in listed.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"file {name} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"file {name} has {file.stat().st_size} bytes, not {size}")
        if _checksum(file) != checksum:
            raise ValueError(f"file {name} does not have its checksum")


def _check_shapes(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in sorted(found.keys() ^ wanted.keys()):
        raise ValueError(f"it {'holds' if name in found else 'lacks'} an array {name}")
    for name, leaf in wanted.items():
        if tuple(found[name].shape) != leaf.shape:
            raise ValueError(f"array {name} has shape {tuple(found[name].shape)}, not {leaf.shape}")
