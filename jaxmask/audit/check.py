"""What a check is: one kind of fault, by name, and how to find it in a block."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool

from jaxmask.audit.block import Block, Marks
from jaxmask.audit.finding import Severity


class Scope(enum.Enum):
    """What a fault says nothing further can be learned about, at its place."""

    SUPPORTS = "supports"  # and so its log-probability neither, which is over the support
    LOGPROBS = "logprobs"
    LOGPROBS_OF_ROW = "log-probabilities of the whole row"
    NOTHING = "nothing"


_OF_LOGPROBS = (Scope.LOGPROBS, Scope.LOGPROBS_OF_ROW)
Find = Callable[[Block, Bool[np.ndarray, " N"]], Marks]


@dataclasses.dataclass(frozen=True)
class Check:
    """One kind of fault.

    Attributes:
      code: its name, in kebab-case.
      severity: what it means for training.
      title: what is wrong, in one sentence.
      remedy: what to do about it.
      find: its places in a block, among the tokens that are still open: those that train, and at which no earlier
        check has found a fault of the same scope. So a fault is reported, and what follows from it is not.
      scope: what it closes at its places.
      reads_logprobs: whether it looks at log-probabilities; as those do that close them.
    """

    code: str
    severity: Severity
    title: str
    remedy: str
    find: Find
    scope: Scope = Scope.NOTHING
    reads_logprobs: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Open:
    """Which tokens of a block train and are at no fault so far; arrays that `close` changes.

    Attributes:
      supports: whose supports can be looked at.
      logprobs: whose log-probabilities can be looked at as well.
    """

    supports: Bool[np.ndarray, " N"]
    logprobs: Bool[np.ndarray, " N"]

    @classmethod
    def of(cls, block: Block) -> Open:
        """All tokens that train."""
        return cls(block.rows.trains.copy(), block.rows.trains.copy())

    def apply(self, check: Check, block: Block) -> Marks:
        """What a check finds among what is open, which it then closes."""
        marks = check.find(
            block, self.logprobs if check.reads_logprobs or check.scope in _OF_LOGPROBS else self.supports
        )
        if check.scope is not Scope.NOTHING and len(marks.rows):
            is_whole = (marks.positions < 0) | (check.scope is Scope.LOGPROBS_OF_ROW)
            is_row = np.zeros(len(block.rows.lengths), np.bool_)
            is_row[marks.rows[is_whole]] = True
            is_closed = is_row[block.row]
            # A value too many has a position, but no token.
            in_row = ~is_whole & (marks.positions < block.rows.lengths[marks.rows])
            is_closed[block.first_tokens[marks.rows[in_row]] + marks.positions[in_row]] = True
            self.logprobs[is_closed] = False
            if check.scope is Scope.SUPPORTS:
                self.supports[is_closed] = False
        return marks
