"""Findings, added up over blocks: how often, and the worst places."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from jaxmask.audit.block import Block, Marks
from jaxmask.audit.check import Check
from jaxmask.audit.finding import Finding, Place, Severity


@dataclasses.dataclass
class _Seen:
    count: int = 0
    num_rows: int = 0
    # A heap, the least bad and latest first: (badness, minus the order seen, place).
    worst: list[tuple[float, int, Place]] = dataclasses.field(default_factory=list)


class Tally:
    """Findings so far."""

    def __init__(self, num_worst: int):
        """None so far; of each kind `num_worst` places are kept."""
        self._num_worst = num_worst
        self._seen: dict[str, _Seen] = {}
        self._order = 0
        self.num_rows_at_fault = 0

    def add(self, block: Block, found: list[tuple[Check, Marks]]) -> None:
        """What the checks found in a block."""
        is_at_fault = np.zeros(len(block.rows.lengths), np.bool_)
        for check, marks in found:
            if len(marks.rows) == 0:
                continue
            seen = self._seen.setdefault(check.code, _Seen())
            seen.count += len(marks.rows)
            seen.num_rows += len(np.unique(marks.rows))
            self._keep_worst(seen, marks, block.rows.names)
            if check.severity is Severity.ERROR:
                is_at_fault[marks.rows] = True
        self.num_rows_at_fault += int(is_at_fault.sum())

    def findings(self, checks: tuple[Check, ...]) -> tuple[Finding, ...]:
        """One of each kind that was seen, in the order of the checks."""
        return tuple(
            Finding(
                check.code, check.severity, check.title, check.remedy, seen.count, seen.num_rows, _sorted(seen.worst)
            )
            for check in checks
            if (seen := self._seen.get(check.code)) is not None
        )

    def _keep_worst(self, seen: _Seen, marks: Marks, names: tuple[str, ...]) -> None:
        for index in np.argsort(-marks.badness, kind="stable")[: self._num_worst].tolist():
            self._order += 1
            badness = float(marks.badness[index])
            if len(seen.worst) < self._num_worst:
                heapq.heappush(seen.worst, (badness, -self._order, marks.place(index, names)))
            elif badness > seen.worst[0][0]:
                heapq.heapreplace(seen.worst, (badness, -self._order, marks.place(index, names)))


def _sorted(worst: list[tuple[float, int, Place]]) -> tuple[Place, ...]:
    return tuple(place for _, _, place in sorted(worst, key=lambda one: (-one[0], -one[1])))
