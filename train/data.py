"""Where prompts come from: examples, in an order that a saved cursor continues."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

# Entries passed over in a row before a stream gives up: generated data never end.
MAX_PASSED_OVER = 2000
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Where a stream of prompts stands; saved with a run's state.

    Attributes:
      epoch: passes over the data that are done.
      position: places of this epoch's order that are done, those passed over among them.
    """

    epoch: int = 0
    position: int = 0


@dataclasses.dataclass(frozen=True)
class Example:
    """One row of data.

    Attributes:
      question: what is asked.
      columns: what reward functions may ask for, by name; plain values.
    """

    question: str
    columns: Mapping[str, Any]


@runtime_checkable
class Examples(Protocol):
    """Rows of data, each made or read when it is asked for."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int, /) -> Example:
        """Row `index`, from 0."""
        ...


@dataclasses.dataclass(frozen=True)
class Encoded:
    """An example and the token ids of its prompt."""

    example: Example
    token_ids: list[int]


class PromptStream:
    """Prompts without end, epoch after epoch.

    The order of an epoch is a function of the seed and the epoch alone, so a cursor is all that a resumed run needs.

    Attributes:
      num_too_long: prompts passed over for their length so far.
    """

    def __init__(
        self,
        examples: Examples,
        encode: Callable[[Example], list[int]],
        *,
        max_length: int,
        seed: int,
        is_shuffled: bool = True,
        is_left_out: Callable[[Example], bool] = lambda example: False,
    ):
        """A stream over examples.

        Args:
          examples: the data.
          encode: the token ids of an example's prompt.
          max_length: prompts of more tokens are passed over.
          seed: of the orders.
          is_shuffled: False keeps the order of the data in every epoch.
          is_left_out: examples that are passed over, held-out ones among them.
        Raises:
          ValueError: there are no examples.
        """
        if len(examples) == 0:
            raise ValueError("there are no examples to draw prompts from.")
        self.num_too_long = 0
        self._examples, self._encode, self._max_length = examples, encode, max_length
        self._is_left_out = is_left_out
        self._order = functools.lru_cache(maxsize=1)(
            lambda epoch: epoch_order(len(examples), seed, epoch) if is_shuffled else np.arange(len(examples))
        )

    def take(self, cursor: Cursor, num: int) -> tuple[list[Encoded], Cursor]:
        """The next `num` prompts from a cursor on, and the cursor behind them.

        Raises:
          ValueError: a whole epoch, or MAX_PASSED_OVER examples in a row, held no prompt that fits.
        """
        taken: list[Encoded] = []
        passed_over = 0
        while len(taken) < num:
            if cursor.position >= len(self._examples):
                cursor = Cursor(cursor.epoch + 1, 0)
            found = self._at(cursor)
            cursor = dataclasses.replace(cursor, position=cursor.position + 1)
            if found is not None:
                taken.append(found)
                passed_over = 0
                continue
            passed_over += 1
            if passed_over >= min(len(self._examples), MAX_PASSED_OVER):
                raise ValueError(
                    f"max_prompt_length={self._max_length} leaves no prompt among {passed_over} in a row; "
                    "it must be at least the tokens of some."
                )
        return taken, cursor

    def _at(self, cursor: Cursor) -> Encoded | None:
        example = self._examples[int(self._order(cursor.epoch)[cursor.position])]
        if self._is_left_out(example):
            return None
        token_ids = self._encode(example)
        if len(token_ids) <= self._max_length:
            return Encoded(example, token_ids)
        if self.num_too_long == 0:
            _LOG.warning("prompts of more than max_prompt_length=%d tokens are passed over", self._max_length)
        self.num_too_long += 1
        return None


def epoch_order(num: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits `num` examples: a permutation drawn from (seed, epoch) alone.

    It sorts raw random words, since NumPy keeps those the same over its versions, which it does not promise of
    `Generator.permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num)
    return np.argsort(words, kind="stable")
