"""Faults of tokens and their supports, each found on its own."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

from jaxmask.audit.block import Block, Marks, joined


def malformed(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Values that are not of the kind they should be."""
    found = block.rows.malformed
    return Marks(
        np.array([one.row for one in found], np.int64),
        np.array([one.position for one in found], np.int64),
        np.zeros(len(found)),
        lambda index: f"{found[index].field}: {found[index].text}",
    )


def token_outside_vocabulary(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Token ids outside [0, V), of context too: the model reads them."""
    # What is no integer has -1 in its place.
    is_malformed = np.zeros(len(is_open), np.bool_)
    for one in block.rows.malformed:
        if 0 <= one.position < block.rows.lengths[one.row]:
            is_malformed[block.first_tokens[one.row] + one.position] = True
    return block.at_tokens(
        is_outside(block, block.rows.token_ids) & ~is_malformed,
        lambda token: f"id {block.rows.token_ids[token]}{range_of_ids(block)}",
    )


def missing(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows without supports, and tokens that train without one."""
    rows = block.rows
    is_bare = (rows.num_supports < 0) & (block.trains_in_row > 0)
    is_whole = (rows.num_supports == rows.lengths)[block.row]
    return joined(
        block.at_rows(
            is_bare & (block.count_in_rows(is_open) > 0),
            lambda row: f"no supports at all for {rows.lengths[row]} tokens",
            rows.lengths.astype(np.float64),
        ),
        block.at_tokens(is_open & is_whole & (rows.support_sizes < 0), lambda token: "it trains, but has no support"),
    )


def other_number(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows with more or fewer supports than tokens."""
    rows = block.rows
    is_other = (rows.num_supports >= 0) & (rows.num_supports != rows.lengths)

    def detail(row: int) -> str:
        text = f"{rows.num_supports[row]} supports for {rows.lengths[row]} tokens"
        tokens = np.arange(rows.lengths[row]) + block.first_tokens[row]
        missed = tokens[(rows.support_sizes[tokens] >= 0) & ~block.holds_own[tokens]]
        return text if len(missed) == 0 else f"{text}; from position {block.position[missed[0]]} they do not fit"

    badness = np.abs(rows.num_supports - rows.lengths).astype(np.float64)
    # Rows that are explained otherwise, and those in which nothing trains, have no open token; empty rows have none.
    return block.at_rows(is_other & ((block.count_in_rows(is_open) > 0) | (rows.lengths == 0)), detail, badness)


def empty(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports of no ids."""
    return block.at_tokens(is_open & (block.rows.support_sizes == 0), lambda token: "it trains, but its support is []")


def id_outside_vocabulary(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports with an id outside [0, V)."""
    marked, number = _tokens_of(block, is_outside(block, block.rows.support_ids))

    def detail(token: int) -> str:
        ids = block.support(token)
        return f"id {ids[is_outside(block, ids)][0]}{range_of_ids(block)}"

    return block.at_tokens(is_open & marked, detail, number)


def id_twice(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Supports that hold an id more than once."""
    repeats = repeated_ids(block)

    def detail(token: int) -> str:
        ids, counts = np.unique(block.support(token), return_counts=True)
        return f"id {ids[counts.argmax()]} stands {counts.max()} times in {block.shown_ids(token)}"

    return block.at_tokens(is_open & (repeats > 0), detail, repeats)


def sampled_outside(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Tokens that do not lie in their support."""
    is_missed = is_open & (block.rows.support_sizes > 0) & ~block.holds_own
    return block.at_tokens(
        is_missed, lambda token: f"id {block.rows.token_ids[token]} is none of {block.shown_ids(token)}"
    )


def behind_stop(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Tokens that train right behind a stop id that trains, but for those that only fill the row up."""
    is_behind = is_behind_stop(block) & ~is_filling(block)
    return block.at_tokens(
        is_behind,
        lambda token: f"id {block.rows.token_ids[token]} trains behind the stop id {block.rows.token_ids[token - 1]}",
    )


def temperature_zero(block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
    """Rows that train and were sampled at temperature 0."""
    is_greedy = np.array([one.temperature is not None and one.temperature <= 0 for one in block.rows.settings], bool)
    return block.at_rows(
        is_greedy & (block.trains_in_row > 0), lambda row: f"temperature {block.rows.settings[row].temperature:g}"
    )


def repeated_ids(block: Block) -> Int[np.ndarray, " N"]:
    """Ids of each support that stand in it before already."""
    ids, owner = block.rows.support_ids, block.owner
    if len(ids) < 2:
        return np.zeros(len(block.rows.token_ids), np.int64)
    # Ids that ascend cannot repeat, and most do: only the others are sorted.
    is_falling = (ids[1:] <= ids[:-1]) & (owner[1:] == owner[:-1])
    is_unsorted = np.zeros(len(block.rows.token_ids), np.bool_)
    is_unsorted[owner[1:][is_falling]] = True
    chosen = is_unsorted[owner]
    some_ids, some_owners = ids[chosen], owner[chosen]
    order = np.lexsort((some_ids, some_owners))
    some_ids, some_owners = some_ids[order], some_owners[order]
    is_repeat = (some_ids[1:] == some_ids[:-1]) & (some_owners[1:] == some_owners[:-1])
    return np.bincount(some_owners[1:][is_repeat], minlength=len(block.rows.token_ids))


def is_behind_stop(block: Block) -> Bool[np.ndarray, " N"]:
    """Which tokens train right behind a stop id that trains, in the same row."""
    found = np.zeros(len(block.rows.token_ids), np.bool_)
    ends = block.is_stop & block.rows.trains
    found[1:] = ends[:-1] & (block.position[1:] > 0)
    return found & block.rows.trains


def is_filling(block: Block) -> Bool[np.ndarray, " N"]:
    """Which tokens stand behind a stop id, with nothing but stop ids up to the end of the row.

    In: stop id 2, all train, [5, 6, 2, 2, 2]  Out: [0, 0, 0, 1, 1]
    """
    last_other = np.full(len(block.rows.lengths), -1)
    np.maximum.at(last_other, block.row[~block.is_stop], block.position[~block.is_stop])
    # The first stop id of the last stretch of them ends the row; the others fill it.
    return block.is_stop & (block.position > last_other[block.row] + 1)


def is_outside(block: Block, ids: Int[np.ndarray, " *S"]) -> Bool[np.ndarray, " *S"]:
    """Which ids lie outside [0, V), or below 0 where V is not known."""
    return ids < 0 if block.vocab_size is None else (ids < 0) | (ids >= block.vocab_size)


def range_of_ids(block: Block) -> str:
    """What is wrong with such an id, to go on with behind it."""
    return " is negative" if block.vocab_size is None else f" is outside [0, {block.vocab_size})"


def _tokens_of(block: Block, is_marked: Bool[np.ndarray, " K"]) -> tuple[Bool[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """Which supports hold a marked id, and how many."""
    number = np.bincount(block.owner[is_marked], minlength=len(block.rows.token_ids))
    return number > 0, number
