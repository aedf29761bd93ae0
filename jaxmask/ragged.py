"""Rows of ids of any length, on the host: from (ids, lengths) to cells and packed bits, and back.

Plain NumPy without a loop over ids, and never a whole row of the vocabulary: the work follows the ids that are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Integer, UInt

from jaxmask.params import check_integer


def flatten(lists: Sequence[Sequence[int]], vocab_size: int) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " R"]]:
    """All ids of the lists one after another, and the length of each list.

    Raises:
      ValueError: an entry that is no list of integers, or an id outside [0, V); the row is named.
    """
    rows = [_integers(index, row) for index, row in enumerate(lists)]
    for index, row in enumerate(rows):
        # Before NumPy sees them: it cannot hold every integer.
        _refuse_outside(index, [token_id for token_id in row if not 0 <= token_id < vocab_size], vocab_size)
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.array([token_id for row in rows for token_id in row], np.int64), lengths


def to_cells(
    token_ids: Integer[np.ndarray, " N"], lengths: Int[np.ndarray, " R"], vocab_size: int, width: int | None
) -> tuple[Int[np.ndarray, "R W"], Int[np.ndarray, " R"], UInt[np.ndarray, "R P"] | None]:
    """Cells, counts and packed bits (None where every row fits its cells) as `Support` defines them.

    Args:
      token_ids: ids of the rows one after another, in any order within a row.
      lengths: ids of each row.
      vocab_size: number of ids, V.
      width: cells per row, W; None takes the longest row.

    Raises:
      ValueError: an id outside [0, V), or twice in a row; the row is named.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    is_outside = (token_ids < 0) | (token_ids >= vocab_size)
    if is_outside.any():
        row = int(rows[is_outside.argmax()])
        _refuse_outside(row, token_ids[is_outside & (rows == row)].tolist(), vocab_size)
    ids = token_ids.astype(np.int64)[np.lexsort((token_ids, rows))]
    is_repeat = (ids[1:] == ids[:-1]) & (rows[1:] == rows[:-1])
    if is_repeat.any():
        row = rows[1:][is_repeat.argmax()]
        raise ValueError(f"support of row {row} repeats ids {ids[1:][is_repeat & (rows[1:] == row)].tolist()}.")

    width = int(lengths.max(initial=1)) if width is None else width
    slots = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    cells = np.full((len(lengths), width), vocab_size, np.int32)
    fits = slots < width
    cells[rows[fits], slots[fits]] = ids[fits]
    packed = _pack(ids, rows, (len(lengths), -(-vocab_size // 8))) if not fits.all() else None
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


def _integers(index: int, row: Sequence[int]) -> list[int]:
    try:
        # NumPy's and JAX's arrays know how to turn into Python's numbers, all at once.
        values = row.tolist() if hasattr(row, "tolist") else row
        return [check_integer(f"each id of row {index}", value) for value in values]
    except TypeError as error:
        raise ValueError(f"support of row {index} must be a list of ids, got {row!r}.") from error


def _refuse_outside(row: int, outside: list[int], vocab_size: int) -> None:
    if outside:
        raise ValueError(f"support of row {row} holds ids {sorted(outside)} outside [0, {vocab_size}).")


def _pack(ids: np.ndarray, rows: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    packed = np.zeros(shape[0] * shape[1], np.uint8)
    np.bitwise_or.at(packed, rows * shape[1] + (ids >> 3), (1 << (ids & 7)).astype(np.uint8))
    return packed.reshape(shape)


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
