"""What an audit keeps of a prompt: a key to find its like, its length, and the range of its ids."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable
from typing import Any

import numpy as np

from jaxmask.audit import values
from jaxmask.audit.rows import NOT_GIVEN
from jaxmask.audit.values import WHOLE_ROW, Problem, is_row


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, of which the ids are forgotten.

    Attributes:
      length: tokens; -1: not known.
      least: id; 0 where there is none.
      largest: id; 0 where there is none.
    """

    length: int = NOT_GIVEN
    least: int = 0
    largest: int = 0

    @classmethod
    def of(cls, token_ids: Any, field: str, problems: list[Problem]) -> Prompt:
        """The prompt of some ids; None: not known.

        Args:
          token_ids: a list or an array of integers, or anything.
          field: its name, for problems.
          problems: those found are added here, as matters of the row: positions are those of completions.
        """
        if token_ids is None:
            return cls()
        found: list[Problem] = []
        ids = values.integers(token_ids, field, found)
        for problem in found:
            place = "" if problem.position == WHOLE_ROW else f" at position {problem.position} of the prompt"
            problems.append(Problem(WHOLE_ROW, field, problem.text + place))
        if ids is None:
            return cls()
        # What is no integer has been named, and has no range.
        return cls(len(ids), int(ids.min()), int(ids.max())) if len(ids) and not found else cls(len(ids))


def prompt_key(token_ids: Any) -> Hashable:
    """Something equal for equal prompts; None for what is no prompt's ids."""
    if not is_row(token_ids) or len(token_ids) == 0:
        return None
    if isinstance(token_ids, list) and not set(map(type, token_ids)) <= {int}:
        return None
    if isinstance(token_ids, np.ndarray) and token_ids.dtype.kind not in "iu":
        return None
    try:
        ids = np.array(token_ids, np.int64)
    except (OverflowError, ValueError):
        return None
    # A digest: all prompts of a file are kept, and some are long.
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
