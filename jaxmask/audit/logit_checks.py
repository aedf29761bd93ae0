"""Faults of supports that only the logits show."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from jaxmask.audit.block import Block, Marks


def impossible_id(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports with an id whose logit is not finite, so that it could not be drawn."""
    values = block.logit_values
    number = np.zeros(len(is_open), np.int64) if values is None else values.num_impossible

    def detail(token: int) -> str:
        ids = block.support(token)
        ids = ids[~np.isfinite(block.rows.logits[token, ids])]
        return f"id {ids[0]} has logit {block.rows.logits[token, ids[0]]:g}"

    return block.at_tokens(is_open & (number > 0), detail, number)


def larger_left_out(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports that leave out an id of larger logit than one they hold; ties may fall either way."""
    values = block.logit_values
    excess = np.full(len(is_open), -np.inf) if values is None else values.excess

    def detail(token: int) -> str:
        left_out, row = values.largest_left_out[token], block.rows.logits[token]
        least = block.support(token)[row[block.support(token)].argmin()]
        return f"id {left_out} of logit {row[left_out]:.6g} is left out, id {least} of {row[least]:.6g} is in"

    return block.at_tokens(is_open & (excess > block.tolerance), detail, excess)
