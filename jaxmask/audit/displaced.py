"""Supports that stand in the wrong place: of the neighbouring token, of the prompt, of another row, of other ids.

Each of them makes tokens fall out of their supports all over a row. Said once, with the cause, it can be mended.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from jaxmask.audit.block import Block, Marks

# Fewer tokens outside their supports than this are faults of their own.
MIN_MISSES = 2
MIN_MISS_SHARE = 0.25
# Rows whose supports may have been exchanged are looked for among so many suspects after each.
REACH = 16
# Which tokens can be tried, and which of them lie where they are looked for.
_Reading = tuple[Bool[np.ndarray, " N"], Bool[np.ndarray, " N"]]
_NO_ID = np.iinfo(np.int64).min


def shifted(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows each token of which lies in the support of the token before it, or of the one after it."""
    misses = _misses(block, is_open)
    is_later, is_sooner = (_all_explained(block, is_open, _neighbours, step) for step in (1, -1))
    return block.at_rows(
        is_later | is_sooner,
        lambda row: (
            f"each token lies in the support of the token {'after' if is_later[row] else 'before'} it, "
            f"{misses[row]} of {block.trains_in_row[row]} outside their own"
        ),
        misses.astype(np.float64),
    )


def numbered_otherwise(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows whose supports hold the id after each token's own, or the one before it."""
    misses = _misses(block, is_open)
    steps = {step: _all_explained(block, is_open, _other_ids, step) for step in (1, -1)}
    return block.at_rows(
        steps[1] | steps[-1],
        lambda row: (
            f"every support holds its token's id {'+ 1' if steps[1][row] else '- 1'}, "
            f"{misses[row]} of {block.trains_in_row[row]} not the id itself"
        ),
        misses.astype(np.float64),
    )


def of_other_row(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows whose tokens all lie in the supports of another row, of which the same cannot be said of its own."""
    misses = _misses(block, is_open)
    suspects = np.flatnonzero(_is_suspect(block, is_open)).tolist()
    source: dict[int, int] = {}
    for place, row in enumerate(suspects):
        around = suspects[max(place - REACH, 0) : place] + suspects[place + 1 : place + 1 + REACH]
        found = next((other for other in around if _fits(block, row, other)), None)
        if found is not None:
            source[row] = found
    is_found = np.isin(np.arange(len(block.rows.lengths)), list(source))
    return block.at_rows(
        is_found,
        lambda row: f"its tokens lie in the supports of {block.rows.names[source[row]]}",
        misses.astype(np.float64),
    )


def of_prompt(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows that came with a support for each token of the prompt, too."""
    rows = block.rows
    extra = rows.num_supports - rows.lengths
    is_found = np.zeros(len(rows.lengths), np.bool_)
    if rows.prompt_lengths is not None:
        is_found |= (rows.prompt_lengths > 0) & (extra == rows.prompt_lengths)
    is_unknown = extra > 0 if rows.prompt_lengths is None else (extra > 0) & (rows.prompt_lengths < 0)
    for row in np.flatnonzero(is_unknown & _is_suspect(block, is_open)):
        is_found[row] = _lie_behind(block, int(row), int(extra[row]))
    return block.at_rows(
        is_found & (block.trains_in_row > 0),
        lambda row: f"{rows.num_supports[row]} supports for {rows.lengths[row]} tokens: {extra[row]} more in front",
        extra.astype(np.float64),
    )


def _misses(block: Block, is_open: Bool[np.ndarray, " N"]) -> Int[np.ndarray, " R"]:
    """Tokens of each row that are not in their support."""
    return block.count_in_rows(is_open & (block.rows.support_sizes >= 0) & ~block.holds_own)


def _is_suspect(block: Block, is_open: Bool[np.ndarray, " N"]) -> Bool[np.ndarray, " R"]:
    misses = _misses(block, is_open)
    num_supported = block.count_in_rows(is_open & (block.rows.support_sizes >= 0))
    return (misses >= MIN_MISSES) & (misses >= MIN_MISS_SHARE * num_supported)


def _all_explained(
    block: Block, is_open: Bool[np.ndarray, " N"], read: Callable[[Block, int], _Reading], step: int
) -> Bool[np.ndarray, " R"]:
    """Rows of as many supports as tokens that miss their own ids, and where the other reading hits all it can."""
    is_whole = block.rows.num_supports == block.rows.lengths
    is_suspect = _is_suspect(block, is_open) & is_whole
    if not is_suspect.any():
        return is_suspect
    is_tried, is_hit = read(block, step)
    num_tried = block.count_in_rows(is_open & is_tried)
    num_hit = block.count_in_rows(is_open & is_tried & is_hit)
    return is_suspect & (num_tried >= MIN_MISSES) & (num_hit == num_tried)


def _neighbours(block: Block, step: int) -> _Reading:
    """Which tokens have a token `step` further on, and which of them lie in the support of that one."""
    token_ids = block.rows.token_ids.astype(np.int64)
    wanted = np.full(len(token_ids), _NO_ID)
    is_tried = np.zeros(len(token_ids), np.bool_)
    is_hit = np.zeros(len(token_ids), np.bool_)
    front, back = (slice(None, -1), slice(1, None)) if step > 0 else (slice(1, None), slice(None, -1))
    is_tried[front] = block.row[front] == block.row[back]
    wanted[back] = token_ids[front]
    is_hit[front] = block.holds(wanted)[back]
    return is_tried, is_hit


def _other_ids(block: Block, step: int) -> _Reading:
    is_tried = block.rows.support_sizes >= 0
    return is_tried, block.holds(block.rows.token_ids.astype(np.int64) + step)


def _fits(block: Block, row: int, other: int) -> bool:
    """Whether the tokens of a row all lie in the supports of another, as far as both go."""
    start, start_other = int(block.first_tokens[row]), int(block.first_tokens[other])
    num = int(min(block.rows.lengths[row], block.rows.lengths[other]))
    return num >= MIN_MISSES and all(
        block.rows.token_ids[start + place] in block.support(start_other + place) for place in range(num)
    )


def _lie_behind(block: Block, row: int, extra: int) -> bool:
    """Whether the tokens of a row lie in the supports `extra` further on, as far as there are any."""
    start, length = int(block.first_tokens[row]), int(block.rows.lengths[row])
    return length - extra >= MIN_MISSES and all(
        block.rows.token_ids[start + place] in block.support(start + place + extra) for place in range(length - extra)
    )
