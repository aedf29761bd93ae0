"""What only several rows together show: completions twice, and groups that were not sampled alike.

Rows of a group lie near each other in files, so that remembering the last ones is enough, and the memory is bounded.
"""

from __future__ import annotations

import collections
import hashlib
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from jaxmask.audit.block import Block, Marks
from jaxmask.audit.check import Check
from jaxmask.audit.finding import Severity
from jaxmask.audit.rows import Setting
from jaxmask.audit.values import shown

MAX_REMEMBERED = 2**16
# Likelier completions may well be drawn twice: among a thousand, two of this probability are at one in two.
MAX_LOGPROB_OF_TWO = -14.0
# One more or less at a cut-off is rounding: engines score a prompt differently in batches of another size.
MAX_OTHER_IDS, MAX_OTHER_SHARE = 2, 0.1

_Value = TypeVar("_Value")


def across_checks() -> tuple[Check, ...]:
    """Checks that remember rows from block to block; new ones for each audit."""
    return (
        Check(
            "duplicate-completion",
            Severity.WARNING,
            "A completion was there before, with the same log-probabilities.",
            "Remove lines that were written twice, and seed the completions of a group differently.",
            _Duplicates().find,
            reads_logprobs=True,
        ),
        Check(
            "group-settings-differ",
            Severity.WARNING,
            "Rows of one prompt were sampled with other settings than the first of them.",
            "Compare rewards within a group of equal settings only.",
            _Settings().find,
        ),
        Check(
            "group-supports-differ",
            Severity.WARNING,
            "Rows of one prompt and equal settings have different first supports: other weights sampled them.",
            "Check that no update of the weights fell into the group, or record policy versions.",
            _FirstSupports().find,
        ),
    )


class _Memory(Generic[_Value]):
    """The last values by key."""

    def __init__(self) -> None:
        self._values: collections.OrderedDict[object, _Value] = collections.OrderedDict()

    def first(self, key: object, value: _Value) -> _Value:
        """What was remembered under the key first, or the value, which then is."""
        if key not in self._values and len(self._values) >= MAX_REMEMBERED:
            self._values.popitem(last=False)
        return self._values.setdefault(key, value)


class _Duplicates:
    def __init__(self) -> None:
        self._names: _Memory[tuple[int, str]] = _Memory()

    def find(self, block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
        rows = block.rows
        is_whole = block.count_in_rows(is_open & np.isfinite(rows.logprobs)) == rows.lengths
        values = np.where(np.isfinite(rows.logprobs), rows.logprobs, 0.0)
        sums = np.bincount(block.row, weights=values, minlength=len(rows.lengths))
        earlier: dict[int, str] = {}
        for row in np.flatnonzero(is_whole & (sums < MAX_LOGPROB_OF_TWO)).tolist():
            tokens = slice(block.first_tokens[row], block.first_tokens[row] + rows.lengths[row])
            text = (
                rows.token_ids[tokens].astype(np.int64).tobytes() + rows.logprobs[tokens].astype(np.float64).tobytes()
            )
            own = (block.source, rows.names[row])
            source, name = self._names.first(hashlib.blake2b(text, digest_size=16).digest(), own)
            if (source, name) != own:
                earlier[row] = name
        return block.at_rows(_mask(earlier, block), lambda row: f"as in {earlier[row]}")


class _Settings:
    def __init__(self) -> None:
        self._settings: _Memory[tuple[str, Setting]] = _Memory()

    def find(self, block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
        others: dict[int, str] = {}
        for row, group in _grouped(block):
            setting = block.rows.settings[row]
            name, first = self._settings.first(group, (block.rows.names[row], setting))
            if first != setting:
                others[row] = f"not as in {name}: {_difference(setting, first)}"
        return block.at_rows(_mask(others, block), lambda row: others[row])


class _FirstSupports:
    def __init__(self) -> None:
        self._supports: _Memory[tuple[str, Int[np.ndarray, " K"]]] = _Memory()

    def find(self, block: Block, is_open: Bool[np.ndarray, " N"]) -> Marks:
        others: dict[int, str] = {}
        for row, group in _grouped(block):
            token = int(block.first_tokens[row])
            if block.rows.lengths[row] == 0 or not is_open[token] or block.rows.support_sizes[token] < 1:
                continue
            ids = np.unique(block.support(token))
            key = (group, block.rows.settings[row])
            name, first = self._supports.first(key, (block.rows.names[row], ids))
            num_other = len(np.setxor1d(ids, first, assume_unique=True))
            if num_other > max(MAX_OTHER_IDS, MAX_OTHER_SHARE * (len(ids) + len(first) + num_other) / 2):
                others[row] = f"{num_other} ids are in one of the first supports of it and of {name}, not in both"
        return block.at_rows(_mask(others, block), lambda row: others[row])


def _grouped(block: Block) -> list[tuple[int, tuple[int, int]]]:
    """Rows that belong to a group, and train, each with its file and group."""
    groups = block.rows.groups
    if groups is None:
        return []
    rows = np.flatnonzero((groups >= 0) & (block.trains_in_row > 0))
    return [(row, (block.source, group)) for row, group in zip(rows.tolist(), groups[rows].tolist(), strict=True)]


def _mask(found: dict[int, str], block: Block) -> Bool[np.ndarray, " R"]:
    is_found = np.zeros(len(block.rows.lengths), np.bool_)
    is_found[list(found)] = True
    return is_found


def _difference(one: Setting, other: Setting) -> str:
    """The settings that differ: "top_p 0.9, not 0.8"."""
    pairs = [(name, value, vars(other)[name]) for name, value in vars(one).items()]
    return ", ".join(f"{name} {shown(value)}, not {shown(second)}" for name, value, second in pairs if value != second)
