"""Supports and log-probabilities as they travel: the forms in which vLLM hands them out.

Host arrays only; how they are serialised is the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

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
    """The supports [R] of compressed sparse rows.

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
