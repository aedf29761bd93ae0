"""Faults of log-probabilities: of the numbers themselves, against each other, and against the logits."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from jaxmask.audit.block import Block, Marks, joined
from jaxmask.audit.logit_values import LogitValues, same
from jaxmask.completions import MAX_LOGPROB

# What vLLM writes where JSON has no -inf.
STAND_IN = -9999.0


def missing(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows without log-probabilities that asked for them, or may have, and tokens that train without one."""
    is_bare = _is_bare(block, is_open)
    asked = np.array([one.asks_for_logprobs is not False for one in block.rows.settings], np.bool_)
    is_whole = (block.rows.num_logprobs == block.rows.lengths)[block.row]
    return joined(
        block.at_rows(
            is_bare & asked,
            lambda row: f"no log-probabilities at all for {block.rows.lengths[row]} tokens",
            block.rows.lengths.astype(np.float64),
        ),
        block.at_tokens(
            is_open & is_whole & ~block.rows.has_logprob, lambda token: "it trains, but has no log-probability"
        ),
    )


def not_asked_for(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows without log-probabilities, as their requests did not ask for any."""
    unasked = np.array([one.asks_for_logprobs is False for one in block.rows.settings], np.bool_)
    is_found = (block.rows.num_logprobs < 0) & (block.trains_in_row > 0) & unasked
    return block.at_rows(is_found, lambda row: f"none for {block.rows.lengths[row]} tokens")


def other_number(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows with more or fewer log-probabilities than tokens."""
    rows = block.rows
    is_other = (rows.num_logprobs >= 0) & (rows.num_logprobs != rows.lengths)
    return block.at_rows(
        is_other & ((block.count_in_rows(is_open) > 0) | (rows.lengths == 0)),
        lambda row: f"{rows.num_logprobs[row]} log-probabilities for {rows.lengths[row]} tokens",
        np.abs(rows.num_logprobs - rows.lengths).astype(np.float64),
    )


def not_finite(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Log-probabilities that are NaN, infinite, or the number that stands for -inf."""
    values = block.rows.logprobs
    is_found = is_open & block.rows.has_logprob & (~np.isfinite(values) | (values == STAND_IN))
    return block.at_tokens(
        is_found, lambda token: f"{values[token]:g}" + (", which stands for -inf" if values[token] == STAND_IN else "")
    )


def above_zero(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Log-probabilities above 0 by more than rounding."""
    values = block.rows.logprobs
    return block.at_tokens(_usable(block, is_open) & (values > MAX_LOGPROB), lambda t: f"{values[t]:g}", values)


def not_over_support(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Log-probabilities that are those over the vocabulary.

    Seen by a support of one id whose log-probability is not 0, by kept log-probabilities that sum to less than 1 in
    most supports of a row, or by the logits.
    """
    values = block.rows.logprobs
    is_usable = _usable(block, is_open)
    is_certain = is_usable & (block.rows.support_sizes == 1) & (values < -MAX_LOGPROB)
    sums = kept_sums(block)
    is_less = is_usable & (sums < 1 - block.tolerance)
    is_common = block.count_in_rows(is_less) * 2 > block.count_in_rows(is_usable & ~np.isnan(sums))
    is_less &= is_common[block.row]
    expected = np.full(len(values), np.nan)
    is_raw = np.zeros(len(values), np.bool_)
    if block.logit_values is not None:
        expected = block.logit_values.kept
        is_raw = is_usable & _is_raw(values, block.logit_values, block.tolerance)

    def detail(token: int) -> str:
        if is_certain[token]:
            return f"the only id of its support has {values[token]:.6g}, not 0"
        if is_raw[token]:
            return f"{values[token]:.6g} is that over the vocabulary; {expected[token]:.6g} over the support"
        return f"its support sums to {sums[token]:.6g}"

    return block.at_tokens(is_certain | is_less | is_raw, detail, np.abs(np.nan_to_num(values)))


def sum_not_one(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Kept log-probabilities whose probabilities do not sum to 1 over their support, or of which some are missing."""
    sums = kept_sums(block)
    is_off = is_open & ((np.abs(sums - 1) > block.tolerance) | (np.isnan(sums) & ~np.isnan(kept_of_token(block))))
    return block.at_tokens(
        is_off, lambda token: f"they sum to {sums[token]:.6g}", np.abs(np.nan_to_num(sums - 1, posinf=1e308))
    )


def not_its_kept_one(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Log-probabilities that differ from what the kept ones say of the same id."""
    kept = kept_of_token(block)
    values = block.rows.logprobs
    off = np.abs(values - kept)
    is_off = _usable(block, is_open) & ~np.isnan(kept) & ~same(values, kept, block.tolerance)
    return block.at_tokens(
        is_off, lambda token: f"{values[token]:.6g}, but {kept[token]:.6g} among the kept", np.nan_to_num(off)
    )


def at_temperature_one(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Log-probabilities over the support that are those of temperature 1, where the row's is another."""
    values = block.logit_values
    if values is None:
        return block.nowhere()
    is_found = same(block.rows.logprobs, values.kept_at_one, block.tolerance)
    return _from_logits(block, values, is_found & _differs(block, values, is_open))


def divided(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Log-probabilities of temperature 1 that were divided by the temperature, as only logits can be."""
    values, temperature = block.logit_values, block.temperature
    if values is None:
        return block.nowhere()
    is_found = np.zeros(len(temperature), np.bool_)
    for at_one in (values.kept_at_one, values.full_at_one):
        is_found |= same(block.rows.logprobs, at_one / np.where(temperature > 0, temperature, np.nan), block.tolerance)
    return _from_logits(block, values, is_found & _differs(block, values, is_open))


def not_of_logits(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Log-probabilities that the logits do not give, in no way we know."""
    values = block.logit_values
    return block.nowhere() if values is None else _from_logits(block, values, _differs(block, values, is_open))


def full_above_support(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Log-probabilities over the vocabulary above those over the support, which hold at least as much."""
    full, values = block.rows.full_logprobs, block.rows.logprobs
    if full is None:
        return block.nowhere()
    is_found = _usable(block, is_open) & (full > values + block.tolerance * np.maximum(1, np.abs(values)))
    return block.at_tokens(
        is_found,
        lambda token: f"{full[token]:.6g} over the vocabulary, {values[token]:.6g} over the support",
        np.nan_to_num(full - values),
    )


def kept_sums(block: Block) -> Float[np.ndarray, " N"]:
    """The sum of the kept probabilities of each support; NaN where they are not known."""
    kept, sizes = block.rows.kept_logprobs, block.rows.support_sizes
    if kept is None:
        return np.full(len(sizes), np.nan)
    with np.errstate(over="ignore"):
        sums = np.bincount(block.owner, weights=np.exp(kept.astype(np.float64)), minlength=len(sizes))
    return np.where(sizes > 0, sums, np.nan)


def kept_of_token(block: Block) -> Float[np.ndarray, " N"]:
    """The kept log-probability of each token; NaN where it is not known."""
    found = np.full(len(block.rows.token_ids), np.nan)
    if block.rows.kept_logprobs is not None:
        is_own = block.rows.support_ids == block.rows.token_ids[block.owner]
        found[block.owner[is_own]] = block.rows.kept_logprobs[is_own]
    return found


def _is_bare(block: Block, is_open: Bool[np.ndarray, " N"]) -> Bool[np.ndarray, " R"]:
    return (block.rows.num_logprobs < 0) & (block.count_in_rows(is_open) > 0)


def _usable(block: Block, is_open: Bool[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    return is_open & block.rows.has_logprob & np.isfinite(block.rows.logprobs)


def _differs(block: Block, values: LogitValues, is_open: Bool[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Which tokens have a log-probability that is not the one of the logits."""
    is_off = ~np.isnan(values.kept) & ~same(block.rows.logprobs, values.kept, block.tolerance)
    return _usable(block, is_open) & is_off


def _is_raw(given: Float[np.ndarray, " N"], values: LogitValues, tolerance: float) -> Bool[np.ndarray, " N"]:
    """Which are those over the vocabulary, at their temperature or at 1, and not those over the support as well."""
    pairs = ((values.full, values.kept), (values.full_at_one, values.kept_at_one))
    is_raw = [same(given, full, tolerance) & ~same(given, kept, tolerance) for full, kept in pairs]
    return (is_raw[0] | is_raw[1]) & ~same(given, values.kept, tolerance)


def _from_logits(block: Block, values: LogitValues, is_found: Bool[np.ndarray, " N"]) -> Marks:
    given, expected = block.rows.logprobs, values.kept
    return block.at_tokens(
        is_found,
        lambda token: f"{given[token]:.6g}, but {expected[token]:.6g} by the logits",
        np.nan_to_num(np.abs(given - expected)),
    )
