"""Faults of supports that only the logits show."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from jaxmask.audit.block import Block, Marks


def impossible_id(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports with an id whose logit is not finite, so that it could not be drawn."""
    values, logits = block.logit_values, block.rows.logits
    if values is None or logits is None:
        return block.nowhere()

    def detail(token: int) -> str:
        ids = block.support(token)
        first = ids[~np.isfinite(logits[token, ids])][0]
        return f"id {first} has logit {logits[token, first]:g}"

    return block.at_tokens(is_open & (values.num_impossible > 0), detail, values.num_impossible)


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
