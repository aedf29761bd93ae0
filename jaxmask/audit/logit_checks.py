"""Faults of supports that only the logits show, or what was kept of them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from jaxmask.audit.block import Block, Marks
from jaxmask.audit.logprob_checks import STAND_IN


def impossible_id(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports with an id whose logit is not finite, or whose kept log-probability is -inf: it could not be drawn."""
    values, logits, kept = block.logit_values, block.rows.logits, block.rows.kept_logprobs
    number = np.zeros(len(is_open), np.int64) if values is None else values.num_impossible
    is_minus_inf = np.zeros(len(block.owner), np.bool_) if kept is None else kept <= STAND_IN
    number = number + np.bincount(block.owner[is_minus_inf], minlength=len(is_open))

    def detail(token: int) -> str:
        ids, own = block.support(token), is_minus_inf[block.owner == token]
        if own.any() or logits is None:
            return f"id {ids[own][0]} has a kept log-probability of minus infinity"
        first = ids[~np.isfinite(logits[token, ids])][0]
        return f"id {first} has logit {logits[token, first]:g}"

    return block.at_tokens(is_open & (number > 0), detail, number)


def larger_left_out(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports that leave out an id of larger logit than one they hold; ties may fall either way."""
    values, logits = block.logit_values, block.rows.logits
    if values is None or logits is None:
        return block.nowhere()

    def detail(token: int) -> str:
        left_out, row = values.largest_left_out[token], logits[token]
        least = block.support(token)[row[block.support(token)].argmin()]
        return f"id {left_out} of logit {row[left_out]:.6g} is left out, id {least} of {row[least]:.6g} is in"

    return block.at_tokens(is_open & (values.excess > block.tolerance), detail, values.excess)
