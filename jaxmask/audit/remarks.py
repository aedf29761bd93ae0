"""What is no fault, but worth knowing: seen in one row at a time, among tokens that are not at fault."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from jaxmask.audit.block import Block, Marks
from jaxmask.audit.support_checks import is_behind_stop, is_filling

# log 0.9: above it, a support may well hold all that float32 can tell from 1.
_LIKELY = -0.105
_SEVERAL = 4
_ROUNDING = 1e-5


def not_ascending(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports whose ids do not ascend."""
    ids, owner = block.rows.support_ids, block.owner
    is_falling = (ids[1:] < ids[:-1]) & (owner[1:] == owner[:-1])
    found = np.zeros(len(block.rows.token_ids), np.bool_)
    found[owner[1:][is_falling]] = True
    return block.at_tokens(is_open & found, block.shown_ids)


def wider_than_top_k(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports of more ids than top-k asked for."""
    top_k = np.array([one.top_k if one.top_k is not None and one.top_k > 0 else 0 for one in block.rows.settings])
    limits = top_k.astype(np.int64)[block.row]
    sizes = block.rows.support_sizes
    return block.at_tokens(
        is_open & (limits > 0) & (sizes > limits),
        lambda token: f"{sizes[token]} ids at top_k {limits[token]}",
        (sizes - limits).astype(np.float64),
    )


def whole_vocabulary(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports of all ids there are."""
    sizes = block.rows.support_sizes
    is_whole = np.zeros(len(sizes), np.bool_) if block.vocab_size in (None, 1) else sizes == block.vocab_size
    return block.at_tokens(is_open & is_whole, lambda token: f"{sizes[token]} ids")


def less_than_top_p(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports that keep less than top-p, where no other filter came before it."""
    top_p = np.array([_alone(one.top_p, one.top_k, one.min_p, block.vocab_size) for one in block.rows.settings])
    least = top_p.astype(np.float64)[block.row]
    mass = kept_mass(block)
    return block.at_tokens(
        is_open & (mass < least - block.tolerance),
        lambda token: f"kept mass {mass[token]:.4g} at top_p {least[token]:g}",
        np.nan_to_num(least - mass),
    )


def mass_always_one(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows in which nothing was cut off, by their log-probabilities, though the supports are not the vocabulary.

    A likely token may keep all of the mass in its support; a row of several that are not likely does not.
    """
    rows, mass = block.rows, kept_mass(block)
    is_whole = np.zeros(len(mass), np.bool_) if block.vocab_size is None else rows.support_sizes >= block.vocab_size
    with np.errstate(invalid="ignore"):
        is_uncertain = is_open & ~np.isnan(mass) & ~is_whole & (rows.logprobs < _LIKELY)
    number = block.count_in_rows(is_uncertain)
    is_found = (number >= _SEVERAL) & (block.count_in_rows(is_uncertain & (mass > 1 - _ROUNDING)) == number)
    return block.at_rows(is_found, lambda row: f"kept mass 1 in all of {number[row]} tokens that were not certain")


def filled_up(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows that go on with stop ids behind the one that ended them."""
    is_filled = is_behind_stop(block) & is_filling(block)
    number = block.count_in_rows(is_filled)
    return block.at_rows(
        number > 0, lambda row: f"{number[row]} tokens behind the stop id that ended it", number.astype(np.float64)
    )


def empty_row(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows of no tokens, for which the file gave nothing else either."""
    rows = block.rows
    return block.at_rows(
        (rows.lengths == 0) & (rows.num_supports <= 0) & (rows.num_logprobs <= 0), lambda row: "no tokens"
    )


def nothing_trains(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows none of whose tokens trains."""
    lengths = block.rows.lengths
    return block.at_rows((lengths > 0) & (block.trains_in_row == 0), lambda row: f"none of {lengths[row]} tokens")


def kept_mass(block: Block) -> Float[np.ndarray, " N"]:
    """The probability that the full policy gives to each support, in (0, 1]; NaN where it is not known.

    From the logits, or S = exp(log p over the vocabulary - log p over the support).
    """
    mass = np.full(len(block.rows.token_ids), np.nan)
    if block.logit_values is not None:
        mass = block.logit_values.kept_mass
    if block.rows.full_logprobs is not None:
        full, values = block.rows.full_logprobs.astype(np.float64), block.rows.logprobs.astype(np.float64)
        # Above 1 by rounding, or by a fault that is found elsewhere.
        with np.errstate(over="ignore", invalid="ignore"):
            mass = np.where(np.isnan(mass), np.minimum(np.exp(full - values), 1.0), mass)
    return np.where(np.isfinite(mass) & (mass > 0), mass, np.nan)


def _alone(top_p: float | None, top_k: int | None, min_p: float | None, vocab_size: int | None) -> float:
    """Top-p where it alone filtered, else NaN."""
    is_unbounded = top_k is not None and (top_k <= 0 or (vocab_size is not None and top_k >= vocab_size))
    return float(top_p) if top_p is not None and is_unbounded and min_p == 0 else np.nan
