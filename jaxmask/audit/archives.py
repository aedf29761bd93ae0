"""NumPy archives: their arrays, never an object that would have to run to be read."""

from __future__ import annotations

import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_ZIP = b"PK"
# What reading one raises where its bytes are not what they should be: `zipfile`, `zlib`, NumPy's headers.
_BROKEN = (
    ArithmeticError,
    EOFError,
    KeyError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
# An array that unpacks to more than this, and to more than so many times what it takes, was made to fill the memory.
MAX_UNPACKED, MAX_RATIO = 2**30, 100
_NUMBERED = re.compile(r"(.+)_(\d{1,9})")


def is_archive(path: Path) -> bool:
    """Whether a file begins like an archive."""
    with path.open("rb") as file:
        return file.read(2) == _ZIP


def arrays(path: Path) -> dict[str, Any]:
    """The arrays by name; in place of one that cannot be read, a text that says why.

    Raises:
      ValueError: the file is no archive, or is cut off.
    """
    try:
        # Opened here, as NumPy leaves a broken one open.
        with warnings.catch_warnings(action="ignore"), path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            _check_sizes(archive.zip)
            return {name: _array(archive, name) for name in archive.files}
    # A single array is no archive.
    except (AttributeError, *_BROKEN) as error:
        raise ValueError(str(error)) from error


def records(named: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arrays that belong together by the number at the end of their names; those without one belong together, too.

    In: tokens_0, mask_0, tokens_1  Out: [{tokens, mask}, {tokens}]
    """
    found: dict[int, dict[str, Any]] = {}
    for name, array in named.items():
        match = _NUMBERED.fullmatch(name)
        number, own = (int(match[2]), match[1]) if match else (-1, name)
        found.setdefault(number, {})[own] = array
    return [found[number] for number in sorted(found)]


def text(array: Any) -> str:
    """The text whose bytes are in an array; raises ValueError where it is none."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        raise ValueError("it is no array of bytes")
    return array.tobytes().decode()


def _check_sizes(archive: zipfile.ZipFile) -> None:
    for entry in archive.infolist():
        if entry.file_size > max(MAX_UNPACKED, MAX_RATIO * entry.compress_size):
            raise ValueError(f"{entry.filename}: {entry.compress_size} bytes would unpack to {entry.file_size}")


def _array(archive: Any, name: str) -> Any:
    try:
        return archive[name]
    except _BROKEN as error:
        return f"an array that cannot be read: {error}"
