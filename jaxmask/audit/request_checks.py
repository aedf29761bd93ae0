"""Faults of what a completion was sampled from, and with: prompts, ids that were allowed, settings that look back."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from jaxmask.audit.block import Block, Marks
from jaxmask.audit.rows import NOT_GIVEN
from jaxmask.audit.support_checks import is_outside, range_of_ids


def prompt_outside_vocabulary(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Prompts with an id outside [0, V)."""
    bounds = block.rows.prompt_bounds
    if bounds is None:
        return block.nowhere()
    outside = is_outside(block, bounds)
    return block.at_rows(
        outside[:, 0] | outside[:, 1],
        lambda row: f"id {bounds[row, outside[row].argmax()]} of the prompt{range_of_ids(block)}",
    )


def prompt_empty(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Prompts of no ids."""
    lengths = block.rows.prompt_lengths
    return block.nowhere() if lengths is None else block.at_rows(lengths == 0, lambda row: "the prompt holds no id")


def not_allowed(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports with an id that the settings of their row do not allow."""
    rows = block.rows
    first = np.full(len(rows.token_ids), NOT_GIVEN)
    begins = np.append(block.starts, len(rows.support_ids))
    for row, setting in enumerate(rows.settings):
        if setting.allowed_token_ids is None:
            continue
        tokens = slice(block.first_tokens[row], block.first_tokens[row] + rows.lengths[row])
        ids = slice(begins[tokens.start], begins[tokens.stop])
        is_wrong = ~np.isin(rows.support_ids[ids], setting.allowed_token_ids)
        # The last one written stays: backwards, the first.
        first[block.owner[ids][is_wrong][::-1]] = rows.support_ids[ids][is_wrong][::-1]
    return block.at_tokens(
        is_open & (first != NOT_GIVEN), lambda token: f"id {first[token]} is none of allowed_token_ids"
    )


def behind_others(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Tokens that train behind tokens of others, in rows with settings that look back at the output."""
    rows = block.rows
    first_other = rows.lengths.copy()
    np.minimum.at(first_other, block.row[~rows.trains], block.position[~rows.trains])
    looks_back = np.array([one.looks_back is not None for one in rows.settings], np.bool_)
    return block.at_tokens(
        rows.trains & looks_back[block.row] & (block.position > first_other[block.row]),
        lambda token: (
            f"it trains with {rows.settings[block.row[token]].looks_back}, "
            f"and the token at position {first_other[block.row[token]]} is of others"
        ),
    )
