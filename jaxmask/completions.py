"""Completion tokens as another engine sent them, on the host: all of them one after another, each known by its row and
its position in it, so that whatever is wrong with one can be named.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from jaxmask import ragged
from jaxmask.params import SamplingParams, check_count
from jaxmask.settings import LOOKS_BACK

# Engines round: the logarithm of a probability of 1 may come out a little above 0.
MAX_LOGPROB = 1e-3
NO_VERSION = -1
_INT32_END = 2**31


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of all rows one after another.

    Attributes:
      ids: in [0, V).
      rows: the row of each token.
      positions: its place in the row.
      lengths: tokens of each row.
      label: what a row is called in messages.
    """

    ids: Int[np.ndarray, " N"]
    rows: Int[np.ndarray, " N"]
    positions: Int[np.ndarray, " N"]
    lengths: Int[np.ndarray, " B"]
    label: str

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]], vocab_size: int, what: str, label: str) -> Tokens:
        """One row per list; raises ValueError, which names the token, unless all are lists of ids in [0, V)."""
        rows = [as_list(f"{what} of {label} {row}", values) for row, values in enumerate(as_list(f"{what}s", lists))]
        lengths = np.array([len(row) for row in rows], np.int64)
        row_of = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(len(row_of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tokens = cls(np.zeros_like(row_of), row_of, positions, lengths, label)
        # Each token a list of its own, so that it is named by its place.
        alone = [[token_id] for row in rows for token_id in row]
        ids, _ = ragged.flatten(alone, vocab_size, what=what, name=tokens.name)
        return dataclasses.replace(tokens, ids=ids)

    def name(self, token: int) -> str:
        """Where a token stands, in words."""
        return f"{self.label} {self.rows[token]}, position {self.positions[token]}"

    def refuse(self, is_wrong: Bool[np.ndarray, " N"], text: Callable[[int], str]) -> None:
        """Raises ValueError with `text` of the first wrong token, if there is one."""
        if is_wrong.any():
            token = int(is_wrong.argmax())
            raise ValueError(f"{self.name(token)}: {text(token)}")

    def entries(self, field: str, lists: Sequence[Any]) -> list[Any]:
        """What the lists hold for each token; raises ValueError unless they have one entry for each."""
        lists = as_list(field, lists)
        if len(lists) != len(self.lengths):
            raise ValueError(f"{field} must have one list per completion, {len(self.lengths)}, got {len(lists)}.")
        rows = [as_list(f"{field} of {self.label} {row}", values) for row, values in enumerate(lists)]
        for row, (values, length) in enumerate(zip(rows, self.lengths, strict=True)):
            if len(values) != length:
                raise ValueError(
                    f"{self.label} {row}: {field} must have one entry per token of the completion, {length}, "
                    f"got {len(values)}."
                )
        return list(itertools.chain.from_iterable(rows))

    def padded(
        self, values: Shaped[np.ndarray, " N"], is_kept: Bool[np.ndarray, " N"], fill: Any, width: int
    ) -> Shaped[np.ndarray, "B T"]:
        """The values of the kept tokens at their places, `fill` elsewhere."""
        cells = np.full((len(self.lengths), width), fill, values.dtype)
        cells[self.rows[is_kept], self.positions[is_kept]] = values[is_kept]
        return cells

    def width(self, field: str, most: int | None, lengths: Int[np.ndarray, " B"]) -> int:
        """The longest of `lengths`, or `most` where given; raises ValueError where a row exceeds it."""
        if most is None:
            return int(lengths.max(initial=1))
        if (lengths > check_count(field, most)).any():
            row = int((lengths > most).argmax())
            raise ValueError(f"{self.label} {row}: {lengths[row]} tokens are more than {field}={most}.")
        return most


def as_list(name: str, values: Any) -> list[Any]:
    """`values` as a list; raises ValueError unless they are a list, a tuple or an array."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} must be a list, got {values!r}.")
    return list(values)


def trained_tokens(
    tokens: Tokens, has_support: Bool[np.ndarray, " N"], loss_mask: Sequence[Sequence[bool]] | None
) -> Bool[np.ndarray, " N"]:
    """Which tokens train: those the mask says, or those that came with a support."""
    if loss_mask is not None:
        flags = tokens.entries("loss_mask", loss_mask)
        is_flag = np.array(
            [isinstance(flag, (np.bool_, numbers.Integral)) and flag in (0, 1) for flag in flags], np.bool_
        )
        tokens.refuse(~is_flag, lambda token: f"loss_mask must be True or False, got {flags[token]!r}.")
        return np.array(flags, np.bool_)
    num_supports = np.bincount(tokens.rows[has_support], minlength=len(tokens.lengths))
    is_bare = (num_supports == 0) & (tokens.lengths > 0)
    if is_bare.any():
        raise ValueError(
            f"{tokens.label} {int(is_bare.argmax())}: no token has a support; where none is meant to train, "
            f"say so with loss_mask."
        )
    return has_support


def before_padding(
    tokens: Tokens, trains: Bool[np.ndarray, " N"], is_stop: Bool[np.ndarray, " N"]
) -> Bool[np.ndarray, " N"]:
    """Which tokens are not repeats of a stop id with which an engine filled up a row that had ended.

    In: stop id 2, all train, [5, 6, 2, 2, 2]  Out: [1, 1, 1, 0, 0]
    """
    ends_row = trains & is_stop
    last_other = np.full(len(tokens.lengths), -1)
    np.maximum.at(last_other, tokens.rows[~is_stop], tokens.positions[~is_stop])
    is_last_turn = ends_row & ~_is_behind(tokens, ends_row) & (tokens.positions > last_other[tokens.rows])
    lengths = np.zeros_like(tokens.lengths)
    np.maximum.at(lengths, tokens.rows[is_last_turn], tokens.positions[is_last_turn] + 1)
    return tokens.positions < np.where(lengths > 0, lengths, tokens.lengths)[tokens.rows]


def check_order(
    tokens: Tokens,
    trains: Bool[np.ndarray, " N"],
    is_stop: Bool[np.ndarray, " N"],
    requests: Sequence[SamplingParams],
) -> None:
    """Raises ValueError for a token that trains where none could be sampled, or not as its settings say."""
    tokens.refuse(
        trains & _is_behind(tokens, trains & is_stop),
        lambda token: (
            f"id {tokens.ids[token]} trains right behind the stop id {tokens.ids[token - 1]}, which ended "
            f"the completion."
        ),
    )
    first_other = tokens.lengths.copy()
    np.minimum.at(first_other, tokens.rows[~trains], tokens.positions[~trains])
    backward = [next((field for field, off in LOOKS_BACK.items() if getattr(r, field) != off), None) for r in requests]
    looks_back = np.array([field is not None for field in backward], np.bool_)
    tokens.refuse(
        trains & looks_back[tokens.rows] & (tokens.positions > first_other[tokens.rows]),
        lambda token: (
            f"{backward[tokens.rows[token]]} looks back at the output, and the token at position "
            f"{first_other[tokens.rows[token]]} was put in by others: what the engine counted as output is not known."
        ),
    )


def trained_logprobs(
    tokens: Tokens, trains: Bool[np.ndarray, " N"], logprobs: Sequence[Sequence[float | None]]
) -> Float[np.ndarray, " N"]:
    """Log-probabilities of the tokens that train, 0 of the others; float32."""
    entries = tokens.entries("logprobs", logprobs)
    values = np.array(
        [_as_float(entry) if one else 0.0 for entry, one in zip(entries, trains, strict=True)], np.float64
    )
    tokens.refuse(
        # Written so that NaN fails.
        ~(values <= MAX_LOGPROB),
        lambda token: f"logprob must be a finite number of at most {MAX_LOGPROB}, got {entries[token]!r}.",
    )
    return values.astype(np.float32)


def check_certain(
    tokens: Tokens,
    trains: Bool[np.ndarray, " N"],
    logprobs: Float[np.ndarray, " N"],
    sizes: Int[np.ndarray, " N"],
) -> None:
    """Raises ValueError where a token that had no choice was not certain: its log-probability is of other ids, too."""
    tokens.refuse(
        trains & (sizes == 1) & (logprobs < -MAX_LOGPROB),
        lambda token: f"the only id of a support has log-probability 0, got {logprobs[token]:g}: of the vocabulary?",
    )


def trained_versions(
    tokens: Tokens, trains: Bool[np.ndarray, " N"], versions: Sequence[Sequence[int | None]]
) -> Int[np.ndarray, " N"]:
    """Versions of the policy behind the tokens that train, `NO_VERSION` of the others; int32."""
    entries = tokens.entries("policy_versions", versions)
    values = np.array([entry if _is_version(entry) else NO_VERSION for entry in entries], np.int32)
    tokens.refuse(
        trains & (values == NO_VERSION),
        lambda token: f"policy version must be an integer in [0, {_INT32_END}), got {entries[token]!r}.",
    )
    return np.where(trains, values, np.int32(NO_VERSION))


def _is_behind(tokens: Tokens, is_one: Bool[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Which tokens stand right behind one of these, in the same row."""
    before = np.zeros_like(is_one)
    before[1:] = is_one[:-1]
    return before & (tokens.positions > 0)


def _as_float(entry: Any) -> float:
    is_number = isinstance(entry, numbers.Real) and not isinstance(entry, bool)
    # Python's integers may be too large for a float.
    return float(entry) if is_number and abs(entry) < _INT32_END else math.nan


def _is_version(entry: Any) -> bool:
    return isinstance(entry, numbers.Integral) and not isinstance(entry, bool) and 0 <= int(entry) < _INT32_END
