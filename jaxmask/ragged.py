"""Rows of ids of any length, on the host: from (ids, lengths) to cells and packed bits, and back.

Plain NumPy without a loop over ids, and never a whole row of the vocabulary: the work follows the ids that are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Integer, UInt

from jaxmask.params import check_integer

Name = Callable[[int], str]
_name: Name = "row {}".format


def flatten(
    lists: Sequence[Sequence[int]], vocab_size: int, *, what: str = "support", name: Name = _name
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " R"]]:
    """All ids of the lists one after another, and the length of each list.

    Args:
      lists: one per row.
      vocab_size: number of ids, V.
      what: what a list is, for messages.
      name: what a row is called in them, from its index.

    Raises:
      ValueError: an entry that is no list of integers, or an id outside [0, V); the row is named.
    """
    rows = [_as_list(row, what, index, name) for index, row in enumerate(lists)]
    ids = list(itertools.chain.from_iterable(rows))
    # One look at all types together; value by value costs far more than everything else here.
    if not set(map(type, ids)) <= {int}:
        rows = [_integers(name(index), row) for index, row in enumerate(rows)]
        ids = list(itertools.chain.from_iterable(rows))
    # Before NumPy sees them: it cannot hold every integer.
    if min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
        for index, row in enumerate(rows):
            outside = [token_id for token_id in row if not 0 <= token_id < vocab_size]
            _refuse_outside(f"{what} of {name(index)}", outside, vocab_size)
    return np.array(ids, np.int64), np.array([len(row) for row in rows], np.int64)


def integer_array(field: str, values: np.ndarray | Sequence[int]) -> Integer[np.ndarray, " N"]:
    """`values` as an array of one axis; raises ValueError unless they are integers."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{field} must have one axis, got shape {array.shape}.")
    if array.dtype.kind in "iu":
        return array
    # NumPy takes an empty list for floats; an empty array that says so is refused like any other.
    if len(array) == 0 and not hasattr(values, "dtype"):
        return array.astype(np.int64)
    raise ValueError(f"{field} must be integers, got {array.dtype}.")


def row_lengths(offsets: Integer[np.ndarray, " R_plus_1"], num_ids: int) -> Int[np.ndarray, " R"]:
    """Ids of each row; raises ValueError unless the offsets start at 0, never decrease and end at `num_ids`."""
    if len(offsets) == 0 or offsets[0] != 0:
        raise ValueError(f"offsets must start at 0, got {offsets[:1].tolist()}.")
    # Not by their differences: those of unsigned integers never show a decrease.
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        row = falls[0]
        raise ValueError(f"offsets must never decrease, got {offsets[row]} then {offsets[row + 1]} at row {row}.")
    if offsets[-1] != num_ids:
        raise ValueError(f"offsets must end at the number of token_ids, {num_ids}, got {offsets[-1]}.")
    return np.diff(offsets.astype(np.int64))


def to_cells(
    token_ids: Integer[np.ndarray, " N"],
    lengths: Int[np.ndarray, " R"],
    vocab_size: int,
    width: int | None,
    name: Name = _name,
) -> tuple[Int[np.ndarray, "R W"], Int[np.ndarray, " R"], UInt[np.ndarray, "R P"] | None]:
    """Cells, counts and packed bits (None where every row fits its cells) as `Support` defines them.

    Args:
      token_ids: ids of the rows one after another, in any order within a row.
      lengths: ids of each row.
      vocab_size: number of ids, V.
      width: cells per row, W; None takes the longest row.
      name: what a row is called in messages, from its index.

    Raises:
      ValueError: an id outside [0, V), or twice in a row; the row is named.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    is_outside = (token_ids < 0) | (token_ids >= vocab_size)
    if is_outside.any():
        row = int(rows[is_outside.argmax()])
        _refuse_outside(f"support of {name(row)}", token_ids[is_outside & (rows == row)].tolist(), vocab_size)
    ids = token_ids.astype(np.int64)[np.lexsort((token_ids, rows))]
    is_repeat = (ids[1:] == ids[:-1]) & (rows[1:] == rows[:-1])
    if is_repeat.any():
        row = int(rows[1:][is_repeat.argmax()])
        raise ValueError(f"support of {name(row)} repeats ids {ids[1:][is_repeat & (rows[1:] == row)].tolist()}.")

    width = int(lengths.max(initial=1)) if width is None else width
    slots = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    cells = np.full((len(lengths), width), vocab_size, np.int32)
    fits = slots < width
    cells[rows[fits], slots[fits]] = ids[fits]
    packed = pack(ids, rows, (len(lengths), -(-vocab_size // 8))) if not fits.all() else None
    return cells, lengths.astype(np.int32), packed


def from_cells(
    cells: Int[np.ndarray, "R W"],
    counts: Int[np.ndarray, " R"],
    packed: UInt[np.ndarray, "R P"] | None,
    vocab_size: int,
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " R+1"]]:
    """Ascending ids of the rows one after another (int32), and where each row starts, with the total last (int64).

    Raises:
      ValueError: a row that keeps more ids than its cells and its bits hold; the row is named.
    """
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    ids = np.empty(offsets[-1], np.int32)
    rows, columns = np.nonzero(np.arange(cells.shape[1])[None, :] < counts[:, None])
    ids[offsets[rows] + columns] = cells[rows, columns]
    is_wide = counts > cells.shape[1]
    wide_rows = np.flatnonzero(is_wide)
    if len(wide_rows):
        kept_rows, kept = _unpack(packed, wide_rows, vocab_size) if packed is not None else (wide_rows[:0], ids[:0])
        _check_held(counts, np.bincount(kept_rows, minlength=len(counts)), wide_rows)
        ids[np.repeat(is_wide, counts)] = kept
    return ids, offsets


def pack(ids: Int[np.ndarray, " N"], rows: Int[np.ndarray, " N"], shape: tuple[int, int]) -> UInt[np.ndarray, "R P"]:
    """Bits of rows: of each id, a bit in its row; bit j of byte i is id 8 i + j."""
    packed = np.zeros(shape[0] * shape[1], np.uint8)
    np.bitwise_or.at(packed, rows * shape[1] + (ids >> 3), (1 << (ids & 7)).astype(np.uint8))
    return packed.reshape(shape)


def nested(rows: Iterator[list[int]], shape: tuple[int, ...]) -> list[Any]:
    """The rows in turn, as lists nested like the axes of a shape; the next row itself where there are none."""
    return [nested(rows, shape[1:]) for _ in range(shape[0])] if shape else next(rows)


def _as_list(row: Sequence[int], what: str, index: int, name: Name) -> list[int]:
    try:
        # NumPy's and JAX's arrays know how to turn into Python's numbers, all at once.
        return list(row.tolist() if hasattr(row, "tolist") else row)
    except TypeError as error:
        raise ValueError(f"{what} of {name(index)} must be a list of ids, got {row!r}.") from error


def _integers(name: str, row: list[int]) -> list[int]:
    return [check_integer(f"each id of {name}", value) for value in row]


def _refuse_outside(row: str, outside: list[int], vocab_size: int) -> None:
    if outside:
        raise ValueError(f"{row} holds ids {sorted(outside)} outside [0, {vocab_size}).")


def _unpack(packed: np.ndarray, rows: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and id of every set bit, row by row, ids ascending. Only bytes that are not 0 are opened."""
    which, byte_index = np.nonzero(packed[rows])
    opened = np.unpackbits(packed[rows[which], byte_index][:, None], axis=1, bitorder="little")
    entry, bit = np.nonzero(opened)
    ids = byte_index[entry] * 8 + bit
    is_id = ids < vocab_size
    return rows[which[entry[is_id]]], ids[is_id]


def _check_held(counts: np.ndarray, held: np.ndarray, wide_rows: np.ndarray) -> None:
    wrong = wide_rows[held[wide_rows] != counts[wide_rows]]
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"support of row {row} counts {counts[row]} ids, more than its cells hold, but has {held[row]} packed bits."
        )
