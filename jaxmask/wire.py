"""Supports and log-probabilities as they travel: sparse rows (vLLM, prime-rl, Miles), padded cells (NeMo-RL, SkyRL),
dicts of log-probabilities. Nested lists are `Support.from_lists` and `Support.to_lists`.

Host arrays only; how they are serialised is the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from jaxmask import ragged
from jaxmask.drawn import TopLogprobs
from jaxmask.params import check_count
from jaxmask.ragged_support import RaggedSupport, as_cells
from jaxmask.support import Support


def to_csr(support: Support | RaggedSupport) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " R_plus_1"]]:
    """Ids of all supports one after another (int32), and the offsets of the rows (int64, first 0, last N).

    Row r keeps `token_ids[offsets[r] : offsets[r + 1]]`, ascending; rows run over the flattened leading axes in
    row-major order. Rows wider than the compact cells are whole.

    Raises:
      ValueError: a row whose count its cells and its packed bits do not hold.

    Source: vLLM, v1/outputs.py, SamplingMaskLists.
    """
    flat = as_cells(support).reshape(-1)
    packed = None if flat.packed is None else np.asarray(flat.packed)
    return ragged.from_cells(np.asarray(flat.token_ids), np.asarray(flat.counts), packed, support.vocab_size)


def from_csr(
    token_ids: Integer[np.ndarray, " N"] | Sequence[int],
    offsets: Integer[np.ndarray, " R_plus_1"] | Sequence[int],
    vocab_size: int,
    *,
    width: int | None = None,
) -> Support:
    """The supports [R] of compressed sparse rows. Counts become offsets as numpy.cumsum([0, *counts]).

    Args:
      token_ids: ids in [0, V) of the rows one after another; in any order within a row, without repeats.
      offsets: where each row starts, with the total last: they start at 0, never decrease and end at N.
      vocab_size: number of ids, V, at least 1.
      width: compact cells per row; the longest row by default. Longer rows go to packed bits too.

    Raises:
      ValueError: ids or offsets that are not integers, offsets that do not cut the ids, an id outside [0, V) or twice
        in a row (the row is named), or vocab_size or width below 1.
    """
    vocab_size = check_count("vocab_size", vocab_size)
    width = None if width is None else check_count("width", width)
    ids = ragged.integer_array("token_ids", token_ids)
    lengths = ragged.row_lengths(ragged.integer_array("offsets", offsets), len(ids))
    cells, counts, packed = ragged.to_cells(ids, lengths, vocab_size, width)
    bits = None if packed is None else jnp.asarray(packed)
    return Support(jnp.asarray(cells), jnp.asarray(counts), bits, vocab_size)


def to_padded(
    support: Support | RaggedSupport, *, fill: int = -1, width: int | None = None
) -> tuple[Int[np.ndarray, "*B K"], Int[np.ndarray, "*B"]]:
    """Ids of each support in cells (int32), ascending, then `fill`; and how many they are (int32).

    In: supports [[4, 9], [7]], width 3  Out: [[4, 9, -1], [7, -1, -1]] and [2, 1]

    Args:
      support: of any leading axes; rows wider than the compact cells are whole.
      fill: what unused cells hold: -1 (SkyRL), or 0 where the counts tell (NeMo-RL).
      width: cells per support, K; the longest row by default, at least 1.

    Raises:
      ValueError: a row has more ids than `width`, or a count that its cells and its packed bits do not hold.
    """
    token_ids, offsets = to_csr(support)
    counts = np.diff(offsets)
    longest = int(counts.max(initial=1))
    width = longest if width is None else check_count("width", width)
    if longest > width:
        raise ValueError(f"support of row {int(counts.argmax())} holds {longest} ids, more than width={width}.")
    cells = np.full((len(counts), width), fill, np.int32)
    cells[np.arange(width) < counts[:, None]] = token_ids
    return cells.reshape(*support.shape, width), counts.astype(np.int32).reshape(support.shape)


def from_padded(
    token_ids: Integer[np.ndarray, "*B K"] | Sequence[Any],
    vocab_size: int,
    *,
    counts: Integer[np.ndarray, "*B"] | Sequence[Any] | None = None,
    width: int | None = None,
) -> Support:
    """The supports [*B] of padded cells.

    Args:
      token_ids: ids of each support, in any order and without repeats, then padding.
      vocab_size: number of ids, V, at least 1.
      counts: ids of each support, in [0, K]; None: all up to the first negative cell.
      width: compact cells per row, as in `from_csr`.

    Raises:
      ValueError: no integers; counts of another shape or outside [0, K]; without counts, an id behind padding; and what
        `from_csr` refuses. Rows are counted over the flattened leading axes.
    """
    cells = np.asarray(token_ids)
    if cells.ndim < 1 or cells.dtype.kind not in "iu":
        raise ValueError(f"token_ids must be integers with a last axis of cells, got {cells.dtype} {cells.shape}.")
    flat = cells.reshape(-1, cells.shape[-1])
    sizes = (flat >= 0).sum(axis=1) if counts is None else _sizes(np.asarray(counts), cells.shape)
    is_id = np.arange(flat.shape[1]) < sizes[:, None]
    is_late = (is_id & (flat < 0)).any(axis=1)
    if counts is None and is_late.any():
        row = int(is_late.argmax())
        raise ValueError(f"support of row {row} has ids behind padding: {flat[row].tolist()}.")
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return from_csr(flat[is_id], offsets, vocab_size, width=width).reshape(*cells.shape[:-1])


def _sizes(counts: np.ndarray, shape: tuple[int, ...]) -> Int[np.ndarray, " R"]:
    """The ids of each row of cells of this shape."""
    if counts.shape != shape[:-1] or counts.dtype.kind not in "iu":
        raise ValueError(f"counts must be integers of shape {shape[:-1]}, got {counts.dtype} of {counts.shape}.")
    sizes = counts.reshape(-1).astype(np.int64)
    is_wrong = (sizes < 0) | (sizes > shape[-1])
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise ValueError(f"count of row {row} must be in [0, {shape[-1]}], got {sizes[row]}.")
    return sizes


class Logprob(NamedTuple):
    """What is reported of one token: its value, its rank, 1 for the likeliest, and its text where that is known."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def to_logprob_dicts(
    token_ids: Array, logprobs: Array, ranks: Array, top: TopLogprobs, num: int | None = None
) -> list[dict[int, Logprob]]:
    """The drawn token of each row, and the likeliest ones with ranks 1, 2, ..., each once; by id, the drawn one first.

    Only tokens that could be drawn are listed, so every number is finite and fits JSON: a dict is shorter where the
    support is, and empty where a row had nothing to draw from.

    Args:
      token_ids: drawn ids [R].
      logprobs: their values [R].
      ranks: their ranks [R].
      top: the likeliest tokens, leading axes [R].
      num: how many of these to list; all of them by default.

    Source: vLLM, `logprobs` of a completion.
    """
    leaves = (token_ids, logprobs, ranks, top.token_ids, top.logprobs)
    drawn_ids, values, own_ranks, top_ids, top_values = map(np.asarray, leaves)
    return logprob_dicts(drawn_ids, values, own_ranks, top_ids, top_values, num)


def logprob_dicts(
    token_ids: Int[np.ndarray, " R"],
    logprobs: Float[np.ndarray, " R"],
    ranks: Int[np.ndarray, " R"],
    top_ids: Int[np.ndarray, "R N"],
    top_values: Float[np.ndarray, "R N"],
    num: int | None = None,
) -> list[dict[int, Logprob]]:
    """`to_logprob_dicts` of arrays on the host."""
    dicts = []
    tops = zip(top_ids[:, :num].tolist(), top_values[:, :num].tolist(), strict=True)
    drawn = zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    for (token_id, logprob, rank), (some_ids, some_values) in zip(drawn, tops, strict=True):
        entries = {token_id: Logprob(logprob, rank)} if math.isfinite(logprob) else {}
        for position, (top_id, value) in enumerate(zip(some_ids, some_values, strict=True)):
            if math.isfinite(value):
                entries.setdefault(top_id, Logprob(value, position + 1))
        dicts.append(entries)
    return dicts
