"""What a check found: one kind of fault, how often, and where it is worst."""

from __future__ import annotations

import dataclasses
import enum


class Severity(enum.Enum):
    """Whether rollouts with a fault can be trained on."""

    ERROR = "error"  # they cannot: the learner would refuse them, or score another distribution
    WARNING = "warning"  # they can, but somebody should know


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a fault was seen.

    Attributes:
      row: the row's name: file, line and choice.
      position: of the token in its completion, from 0; -1 where the whole row is at fault.
      detail: what was found there.
      badness: the larger, the worse; places of one kind of fault are sorted by it.
    """

    row: str
    position: int
    detail: str
    badness: float = 0.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """All that was seen of one kind of fault.

    Attributes:
      code: its name, in kebab-case.
      severity: what it means for training.
      title: what is wrong, in one sentence.
      remedy: what to do about it.
      count: how often it was seen.
      num_rows: rows in which it was seen.
      worst: some of the places, worst first.
    """

    code: str
    severity: Severity
    title: str
    remedy: str
    count: int
    num_rows: int
    worst: tuple[Place, ...]
