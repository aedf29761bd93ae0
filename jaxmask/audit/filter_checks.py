"""Supports against the settings of their row: ids that a filter should have cut off."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmask.audit.block import Block, Marks
from jaxmask.audit.remarks import kept_mass


def past_filters(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports that hold an id which min-p, top-k or top-p cut off, as far as their log-probabilities are known.

    Of each support, relative to all of its ids: of the logits over the temperature, or the kept ones.

    - min-p: the least probable id has less than min_p times the most probable one.
    - top-k: more than k ids, and the least probable one does not tie with the k-th.
    - top-p: the ids that are more probable than the least probable one keep top_p of the whole vocabulary already,
      whatever came before top-p.
    - Without log-probabilities: all ids of the vocabulary at a top-k below it, or several at top-k 1. They would all
      have to tie, and the token's log-probability is not that of a tie.
    """
    values = _log_shares(block)
    least, largest = _extremes(block, values)
    min_p, top_p = (_of_tokens(block, name) for name in ("min_p", "top_p"))
    with np.errstate(divide="ignore", invalid="ignore"):
        by_min_p = (min_p > 0) & (least - largest < np.log(min_p) - block.tolerance)
    above = _mass_above(block, values, least)
    with np.errstate(invalid="ignore"):
        by_top_p = (top_p < 1) & (kept_mass(block) * above >= top_p + block.tolerance)
        by_top_k = _kth_largest(block, values) - least > block.tolerance
    names = {"min_p": by_min_p, "top_k": by_top_k | _no_tie(block), "top_p": by_top_p}

    def detail(token: int) -> str:
        name = next(name for name, is_cut in names.items() if is_cut[token])
        setting = vars(block.rows.settings[int(block.row[token])])[name]
        return f"{name} {setting:g} leaves fewer ids than {block.shown_ids(token)}"

    return block.at_tokens(is_open & np.any([*names.values()], axis=0), detail, block.rows.support_sizes)


def _log_shares(block: Block) -> Float[np.ndarray, " K"]:
    """Log-probabilities of the ids over their support; NaN where not known."""
    rows = block.rows
    values = np.full(len(rows.support_ids), np.nan)
    if rows.kept_logprobs is not None:
        values = np.where(np.isfinite(rows.kept_logprobs), rows.kept_logprobs, np.nan).astype(np.float64)
    if rows.logits is not None:
        is_inside = (rows.support_ids >= 0) & (rows.support_ids < rows.logits.shape[1])
        own = rows.logits[block.owner, np.where(is_inside, rows.support_ids, 0)].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            own = own / block.temperature[block.owner]
        own = np.where(is_inside & np.isfinite(own), own, np.nan)
        values = np.where(np.isnan(own), values, own - _log_sums(block, own)[block.owner])
    return values


def _log_sums(block: Block, values: Float[np.ndarray, " K"]) -> Float[np.ndarray, " N"]:
    _, top = _extremes(block, values)
    top = np.where(np.isfinite(top), top, 0.0)
    sums = np.bincount(block.owner, weights=np.exp(values - top[block.owner]), minlength=len(top))
    with np.errstate(divide="ignore"):
        return top + np.log(sums)


def _extremes(block: Block, values: Float[np.ndarray, " K"]) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """The least and the largest value of each support; NaN where one is not known, or where there is no support."""
    least = np.full(len(block.rows.token_ids), np.nan)
    largest = least.copy()
    tokens = np.flatnonzero(block.rows.support_sizes > 0)
    if len(tokens):
        least[tokens] = np.minimum.reduceat(values, block.starts[tokens])
        largest[tokens] = np.maximum.reduceat(values, block.starts[tokens])
    return least, largest


def _mass_above(
    block: Block, values: Float[np.ndarray, " K"], least: Float[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """The probability over the support of the ids that do not tie with the least probable one."""
    with np.errstate(invalid="ignore", over="ignore"):
        shares = np.where(values > least[block.owner] + block.tolerance, np.exp(values), 0.0)
    above = np.bincount(block.owner, weights=shares, minlength=len(least))
    return np.where(np.isnan(least), np.nan, above)


def _kth_largest(block: Block, values: Float[np.ndarray, " K"]) -> Float[np.ndarray, " N"]:
    """The k-th largest value of the supports of more than k ids; NaN elsewhere."""
    found = np.full(len(block.rows.token_ids), np.nan)
    top_k = _top_k(block)
    tokens = np.flatnonzero((top_k > 0) & (block.rows.support_sizes > top_k))
    is_chosen = np.zeros(len(found), np.bool_)
    is_chosen[tokens] = True
    chosen = is_chosen[block.owner]
    owner, some = block.owner[chosen], values[chosen]
    order = np.lexsort((-some, owner))
    starts = np.cumsum(block.rows.support_sizes[tokens]) - block.rows.support_sizes[tokens]
    found[tokens] = some[order][starts + top_k[tokens] - 1]
    return found


def _no_tie(block: Block) -> Bool[np.ndarray, " N"]:
    sizes, top_k = block.rows.support_sizes, _top_k(block)
    must_tie = (top_k == 1) & (sizes > 1)
    if block.vocab_size is not None:
        must_tie |= (top_k > 0) & (top_k < block.vocab_size) & (sizes == block.vocab_size)
    logs = np.log(np.maximum(sizes, 1))
    with np.errstate(invalid="ignore"):
        return must_tie & (np.abs(block.rows.logprobs + logs) > block.tolerance * np.maximum(1.0, logs))


def _top_k(block: Block) -> Int[np.ndarray, " N"]:
    of_rows = [one.top_k if one.top_k is not None and one.top_k > 0 else 0 for one in block.rows.settings]
    return np.array(of_rows, np.int64)[block.row]


def _of_tokens(block: Block, name: str) -> Float[np.ndarray, " N"]:
    of_rows = [np.nan if (value := vars(one)[name]) is None else float(value) for one in block.rows.settings]
    return np.array(of_rows, np.float64)[block.row]
