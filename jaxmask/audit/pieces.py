"""Supports of a completion and what stands beside them, cut into one piece for each token."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxmask.audit import values
from jaxmask.audit.completion import Cut, Fields
from jaxmask.audit.rows import NOT_GIVEN
from jaxmask.audit.values import WHOLE_ROW, Problem


def supports(
    given: Any, fields: Fields, problems: list[Problem]
) -> tuple[Int[np.ndarray, " K"], Int[np.ndarray, " N"]] | None:
    """The ids of a completion's supports and how many each has, -1 for a support that is not there; None for none.

    Args:
      given: lists of ids, or a `Cut`. Offsets or counts that do not cut the ids leave all supports out.
      fields: names, for problems.
      problems: those found are added here.
    """
    if given is None:
        return None
    if not isinstance(given, Cut):
        return values.integer_lists(given, fields.supports, problems)
    ids = values.integers(given.ids, f"{fields.supports} ids", problems)
    is_by_offsets = given.counts is None
    where = f"{fields.supports} {'offsets' if is_by_offsets else 'counts'}"
    cuts = values.integers(given.offsets if is_by_offsets else given.counts, where, problems)
    if ids is None or cuts is None:
        return None
    sizes = np.diff(cuts) if is_by_offsets else cuts
    problem = _uncut(cuts, len(ids), where) if is_by_offsets else _uncounted(cuts, len(ids), where)
    if problem is not None:
        problems.append(problem)
        # What belongs to which token is not known, so no token has a support.
        return np.zeros(0, np.int64), np.full(len(sizes), NOT_GIVEN)
    return ids, np.where(sizes == 0, NOT_GIVEN, sizes) if given.is_none_empty else sizes


def _uncut(offsets: Int[np.ndarray, " M"], num_ids: int, field: str) -> Problem | None:
    if len(offsets) == 0 or offsets[0] != 0:
        return Problem(WHOLE_ROW, field, f"offsets start with {offsets[:1].tolist()}, not with 0")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        first = int(falls[0])
        return Problem(first, field, f"offsets fall from {offsets[first]} to {offsets[first + 1]}")
    if offsets[-1] != num_ids:
        return Problem(WHOLE_ROW, field, f"offsets end with {offsets[-1]}, and there are {num_ids} ids")
    return None


def _uncounted(counts: Int[np.ndarray, " N"], num_ids: int, field: str) -> Problem | None:
    is_wrong = (counts < 0) | (counts > num_ids)
    if is_wrong.any():
        first = int(is_wrong.argmax())
        return Problem(first, field, f"a count is {counts[first]}, and there are {num_ids} ids")
    if counts.sum() != num_ids:
        return Problem(WHOLE_ROW, field, f"counts add up to {counts.sum()}, and there are {num_ids} ids")
    return None


def kept_logprobs(
    given: Any, sizes: Int[np.ndarray, " N"], fields: Fields, problems: list[Problem]
) -> Float[np.ndarray, " K"] | None:
    """Log-probabilities beside the ids of supports, NaN where there are not as many as ids; None for none.

    Args:
      given: one list for each support, or all of them as numbers one after another.
      sizes: of the supports.
      fields: names, for problems.
      problems: those found are added here.
    """
    if given is None:
        return None
    is_flat = isinstance(given, np.ndarray) or (isinstance(given, list) and float in set(map(type, given)))
    if is_flat:
        flat = values.numbers(given, fields.kept_logprobs, problems)
        num_ids = int(np.maximum(sizes, 0).sum())
        check_length(None if flat is None else flat[0], num_ids, fields.kept_logprobs, problems)
        return None if flat is None else fitted(flat[0], num_ids, np.nan)
    lists = values.number_lists(given, fields.kept_logprobs, problems)
    if lists is None:
        return None
    numbers, lengths = lists
    check_length(lengths, len(sizes), fields.kept_logprobs, problems)
    lengths = fitted(lengths, len(sizes), NOT_GIVEN)
    for token in np.flatnonzero((lengths != sizes) & (lengths != NOT_GIVEN)):
        text = f"{lengths[token]} numbers stand beside a support of {max(sizes[token], 0)} ids"
        problems.append(Problem(int(token), fields.kept_logprobs, text))
    return _side_by_side(numbers, lengths, np.maximum(sizes, 0))


def _side_by_side(
    numbers: Float[np.ndarray, " M"], lengths: Int[np.ndarray, " N"], sizes: Int[np.ndarray, " N"]
) -> Float[np.ndarray, " K"]:
    """Numbers for the ids of supports, NaN where a token's numbers are not as many as its ids."""
    lengths = np.maximum(lengths, 0)
    kept = np.full(int(sizes.sum()), np.nan)
    fits = lengths == sizes
    kept[np.repeat(fits, sizes)] = numbers[: int(lengths.sum())][np.repeat(fits, lengths)]
    return kept


def check_length(given: np.ndarray | None, length: int, field: str, problems: list[Problem]) -> None:
    """Adds a problem where there are not `length` entries."""
    if given is not None and len(given) != length:
        problems.append(Problem(WHOLE_ROW, field, f"{len(given)} entries stand where {length} should"))


def fitted(given: Shaped[np.ndarray, " N"], length: int, fill: Any) -> Shaped[np.ndarray, " T"]:
    """The first `length` values, with `fill` for those that are missing."""
    if len(given) >= length:
        return given[:length]
    return np.concatenate([given, np.full(length - len(given), fill, given.dtype)])
