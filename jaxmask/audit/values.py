"""Values of a file as arrays: what is not of the kind it should be becomes a `Problem`, never an exception.

A look at the types of a whole list together first, one by one only where that fails: value by value costs far more than
everything else here.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import itertools
import math
import reprlib
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from jaxmask.audit.rows import NOT_GIVEN

WHOLE_ROW = -1
_INT64 = range(-(2**63), 2**63)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A value of a row that is not of the kind it should be.

    Attributes:
      position: of the token, from 0; WHOLE_ROW where it is a matter of the row.
      field: the name it has in the file.
      text: what was found and what should stand there.
    """

    position: int
    field: str
    text: str


def shown(value: Any) -> str:
    """A value as a few characters, whatever it is."""
    return reprlib.repr(value)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of 64 bits."""
    return type(value) is int and value in _INT64


def is_row(values: Any) -> bool:
    """Whether values are a list, or an array of one axis."""
    return isinstance(values, list) or (isinstance(values, np.ndarray) and values.ndim == 1)


def integers(values: Any, field: str, problems: list[Problem]) -> Int[np.ndarray, " N"] | None:
    """The values as int64, `NOT_GIVEN` where one is no integer of 64 bits; None where they are no list at all.

    Args:
      values: a list, or an array of one axis.
      field: its name, for problems.
      problems: those found are added here.
    """
    if isinstance(values, np.ndarray):
        return _integer_array(values, field, problems)
    if not isinstance(values, (list, tuple)):
        problems.append(Problem(WHOLE_ROW, field, f"{shown(values)} stands where a list of integers should"))
        return None
    quick = _quick_integers(values)
    if quick is not None:
        return quick
    for position, value in enumerate(values):
        if not is_integer(value):
            problems.append(Problem(position, field, _not_an_integer(value)))
    return np.array([value if is_integer(value) else NOT_GIVEN for value in values], np.int64)


def integer_lists(
    values: Any, field: str, problems: list[Problem]
) -> tuple[Int[np.ndarray, " K"], Int[np.ndarray, " N"]] | None:
    """All ids of a list of lists one after another, and the length of each; None where there is no list at all.

    An id that is no integer of 64 bits is `NOT_GIVEN`; None in place of a list has the length `NOT_GIVEN`, as has what
    is no list.
    """
    if not isinstance(values, (list, tuple)):
        problems.append(Problem(WHOLE_ROW, field, f"{shown(values)} stands where a list of lists of ids should"))
        return None
    rows, sizes = _lists(values, field, problems)
    flat = list(itertools.chain.from_iterable(rows))
    quick = _quick_integers(flat)
    if quick is not None:
        return quick, sizes
    for position, row in enumerate(rows):
        problems += [Problem(position, field, _not_an_integer(value)) for value in row if not is_integer(value)]
    return np.array([value if is_integer(value) else NOT_GIVEN for value in flat], np.int64), sizes


def numbers(
    values: Any, field: str, problems: list[Problem]
) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]] | None:
    """The values as float64, NaN where there is none, and which were given; None where they are no list at all.

    A NaN, an infinity or a null is nobody's fault here: the first two are given, the last is not.
    """
    if isinstance(values, np.ndarray):
        return _number_array(values, field, problems)
    if not isinstance(values, (list, tuple)):
        problems.append(Problem(WHOLE_ROW, field, f"{shown(values)} stands where a list of numbers should"))
        return None
    quick = _quick_numbers(values)
    if quick is not None:
        return quick, np.array([value is not None for value in values], np.bool_)
    floats = [_float(value) for value in values]
    for position, (value, found) in enumerate(zip(values, floats, strict=True)):
        if found is None and value is not None:
            problems.append(Problem(position, field, f"{shown(value)} stands where a number should"))
    has = np.array([found is not None for found in floats], np.bool_)
    return np.array([math.nan if found is None else found for found in floats], np.float64), has


def number_lists(
    values: Any, field: str, problems: list[Problem]
) -> tuple[Float[np.ndarray, " K"], Int[np.ndarray, " N"]] | None:
    """All numbers of a list of lists one after another, NaN where there is none, and the length of each list."""
    if not isinstance(values, (list, tuple)):
        problems.append(Problem(WHOLE_ROW, field, f"{shown(values)} stands where a list of lists of numbers should"))
        return None
    rows, sizes = _lists(values, field, problems)
    flat = list(itertools.chain.from_iterable(rows))
    quick = _quick_numbers(flat)
    if quick is not None:
        return quick, sizes
    for position, row in enumerate(rows):
        problems += [
            Problem(position, field, f"{shown(value)} stands where a number should")
            for value in row
            if value is not None and _float(value) is None
        ]
    floats = map(_float, flat)
    return np.array([math.nan if found is None else found for found in floats], np.float64), sizes


def flags(values: Any, field: str, problems: list[Problem]) -> Bool[np.ndarray, " N"] | None:
    """The values as booleans; what is neither true or false nor 0 or 1 counts as true. None where they are no list."""
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, (list, tuple)):
        problems.append(Problem(WHOLE_ROW, field, f"{shown(values)} stands where a list of flags should"))
        return None
    if set(map(type, values)) <= {bool}:
        return np.array(values, np.bool_)
    is_flag = [type(value) in (bool, int, float) and value in (0, 1) for value in values]
    for position, (value, is_good) in enumerate(zip(values, is_flag, strict=True)):
        if not is_good:
            problems.append(Problem(position, field, f"{shown(value)} stands where true or false should"))
    return np.array([not is_good or bool(value) for value, is_good in zip(values, is_flag, strict=True)], np.bool_)


def packed(text: Any, dtype: str, field: str, problems: list[Problem]) -> Shaped[np.ndarray, " N"] | None:
    """The array in base64 text, or in bytes; None where it is none.

    Args:
      text: of the array's bytes.
      dtype: of the array, little-endian: "<i4".
      field: its name, for problems.
      problems: those found are added here.
    """
    try:
        data = bytes(text) if isinstance(text, (bytes, bytearray)) else base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        problems.append(Problem(WHOLE_ROW, field, f"{shown(text)} stands where an array in base64 should"))
        return None
    if len(data) % np.dtype(dtype).itemsize:
        problems.append(
            Problem(WHOLE_ROW, field, f"{len(data)} bytes are no whole number of {np.dtype(dtype).name} values")
        )
        return None
    return np.frombuffer(data, dtype)


def unpacked(given: Any, dtype: str, field: str, problems: list[Problem]) -> Any:
    """What base64 text or bytes hold as an array, and anything else as it is."""
    return packed(given, dtype, field, problems) if isinstance(given, (str, bytes)) else given


def _lists(
    values: list[Any] | tuple[Any, ...], field: str, problems: list[Problem]
) -> tuple[list[Any], Int[np.ndarray, " N"]]:
    if set(map(type, values)) <= {list}:
        return list(values), np.fromiter(map(len, values), np.int64, len(values))
    for position, row in enumerate(values):
        if row is not None and not isinstance(row, (list, tuple)):
            problems.append(Problem(position, field, f"{shown(row)} stands where a list should"))
    is_list = [isinstance(row, (list, tuple)) for row in values]
    sizes = [len(row) if is_one else NOT_GIVEN for row, is_one in zip(values, is_list, strict=True)]
    return [row if is_one else [] for row, is_one in zip(values, is_list, strict=True)], np.array(sizes, np.int64)


def _quick_integers(values: list[Any] | tuple[Any, ...]) -> Int[np.ndarray, " N"] | None:
    if set(map(type, values)) <= {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return None
    return None


def _quick_numbers(values: list[Any] | tuple[Any, ...]) -> Float[np.ndarray, " N"] | None:
    if set(map(type, values)) <= {float, int, type(None)}:
        try:
            # NumPy takes None for NaN.
            return np.array(values, np.float64)
        except OverflowError:
            return None
    return None


def _not_an_integer(value: Any) -> str:
    return f"{shown(value)} stands where an integer{' of 64 bits' if type(value) is int else ''} should"


def _float(value: Any) -> float | None:
    try:
        return float(value) if type(value) in (int, float) else None
    except OverflowError:
        return None


def _integer_array(values: np.ndarray, field: str, problems: list[Problem]) -> Int[np.ndarray, " N"] | None:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        problems.append(Problem(WHOLE_ROW, field, f"{values.dtype} of shape {values.shape} is no row of integers"))
        return None
    if values.dtype.kind == "u" and values.dtype.itemsize == 8 and (values > _INT64[-1]).any():
        is_beyond = values > _INT64[-1]
        problems.append(Problem(int(is_beyond.argmax()), field, "an integer has more than 64 bits with its sign"))
        return np.where(is_beyond, NOT_GIVEN, values.astype(np.int64))
    return values.astype(np.int64)


def _number_array(
    values: np.ndarray, field: str, problems: list[Problem]
) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]] | None:
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        problems.append(Problem(WHOLE_ROW, field, f"{values.dtype} of shape {values.shape} is no row of numbers"))
        return None
    return values.astype(np.float64), np.ones(len(values), np.bool_)
