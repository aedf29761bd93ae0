"""From completions to blocks of rows. Whatever a completion holds, a row comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from jaxmask.audit import pieces, values
from jaxmask.audit.completion import Completion
from jaxmask.audit.prompt import Prompt
from jaxmask.audit.rows import NOT_GIVEN, Malformed, Rows, Setting
from jaxmask.audit.values import WHOLE_ROW, Problem

BLOCK_TOKENS = 1 << 16
# Rows without tokens count as well: a file of nothing but bad lines is as large as any other.
BLOCK_ROWS = 1 << 13


@dataclasses.dataclass(frozen=True)
class _Row:
    name: str
    setting: Setting
    group: int
    prompt: Prompt
    vocab_size: int | None
    num_supports: int
    num_logprobs: int
    token_ids: Int[np.ndarray, " T"]
    trains: Bool[np.ndarray, " T"]
    support_sizes: Int[np.ndarray, " T"]
    support_ids: Int[np.ndarray, " K"]
    logprobs: Float[np.ndarray, " T"]
    has_logprob: Bool[np.ndarray, " T"]
    full_logprobs: Float[np.ndarray, " T"] | None
    kept_logprobs: Float[np.ndarray, " K"] | None
    logits: Float[np.ndarray, "T V"] | None
    problems: tuple[Problem, ...]


class RowsBuilder:
    """Collects completions and hands them out as blocks.

    A token id, or an id of a support, that is no integer of 64 bits stands as -1 in the arrays, so that what belongs
    beside it stays in place; it is among the malformed as well.
    """

    def __init__(self, max_tokens: int = BLOCK_TOKENS, max_rows: int = BLOCK_ROWS):
        """An empty one.

        Args:
          max_tokens: a block is full when it has so many tokens, or ids of supports in the same measure (16 each).
          max_rows: or so many rows.
        """
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._rows: list[_Row] = []
        self._groups: dict[Hashable, int] = {}
        self._num_tokens = self._num_ids = self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to `build`."""
        return (
            self._num_tokens >= self._max_tokens
            or self._num_ids >= 16 * self._max_tokens
            or len(self._rows) >= self._max_rows
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to `build` from."""
        return not self._rows

    def add(self, completion: Completion, num_bytes: int = 0) -> None:
        """One more row.

        Args:
          completion: any.
          num_bytes: what it took in the file.
        """
        row = _row(completion, self._group(completion.group))
        self._rows.append(row)
        self._num_tokens += len(row.token_ids)
        self._num_ids += len(row.support_ids)
        self._num_bytes += num_bytes

    def build(self) -> Rows:
        """The rows so far, which are then forgotten; groups keep their numbers from block to block."""
        rows, self._rows = self._rows, []
        num_bytes, self._num_bytes, self._num_tokens, self._num_ids = self._num_bytes, 0, 0, 0
        malformed = [
            Malformed(index, problem.position, problem.field, problem.text)
            for index, row in enumerate(rows)
            for problem in row.problems
        ]
        return Rows(
            names=tuple(row.name for row in rows),
            settings=tuple(row.setting for row in rows),
            lengths=np.array([len(row.token_ids) for row in rows], np.int64),
            num_supports=np.array([row.num_supports for row in rows], np.int64),
            num_logprobs=np.array([row.num_logprobs for row in rows], np.int64),
            token_ids=_joined([row.token_ids for row in rows], np.int64),
            trains=_joined([row.trains for row in rows], np.bool_),
            support_sizes=_joined([row.support_sizes for row in rows], np.int64),
            support_ids=_joined([row.support_ids for row in rows], np.int64),
            logprobs=_joined([row.logprobs for row in rows], np.float64),
            has_logprob=_joined([row.has_logprob for row in rows], np.bool_),
            full_logprobs=_joined_if_any([(row.full_logprobs, len(row.token_ids)) for row in rows]),
            kept_logprobs=_joined_if_any([(row.kept_logprobs, len(row.support_ids)) for row in rows]),
            logits=_joined_if_any([(row.logits, len(row.token_ids)) for row in rows]),
            malformed=tuple(malformed),
            groups=np.array([row.group for row in rows], np.int64),
            num_bytes=num_bytes,
            vocab_size=max((row.vocab_size for row in rows if row.vocab_size is not None), default=None),
            prompt_lengths=np.array([row.prompt.length for row in rows], np.int64),
            prompt_bounds=np.array([(row.prompt.least, row.prompt.largest) for row in rows], np.int64).reshape(-1, 2),
        )

    def _group(self, key: Hashable) -> int:
        return NOT_GIVEN if key is None else self._groups.setdefault(key, len(self._groups))


def _row(completion: Completion, group: int) -> _Row:
    problems = list(completion.problems)
    fields = completion.fields
    token_ids = values.integers(completion.token_ids, fields.token_ids, problems)
    token_ids = np.zeros(0, np.int64) if token_ids is None else token_ids
    num_tokens = len(token_ids)
    given = pieces.supports(completion.supports, fields, problems)
    ids, all_sizes = (np.zeros(0, np.int64), np.zeros(0, np.int64)) if given is None else given
    kept = pieces.kept_logprobs(completion.kept_logprobs, all_sizes, fields, problems)
    sizes = pieces.fitted(all_sizes, num_tokens, NOT_GIVEN)
    num_ids = int(np.maximum(sizes, 0).sum())
    logprobs = _numbers(completion.logprobs, fields.logprobs, problems)
    full = _numbers(completion.full_logprobs, fields.full_logprobs, problems)
    pieces.check_length(None if full is None else full[0], num_tokens, fields.full_logprobs, problems)
    trains = None
    if completion.loss_mask is not None:
        trains = values.flags(completion.loss_mask, fields.loss_mask, problems)
        pieces.check_length(trains, num_tokens, fields.loss_mask, problems)
    return _Row(
        name=completion.name,
        setting=completion.setting,
        group=group,
        prompt=Prompt.of(completion.prompt_ids, fields.prompt_ids, problems),
        vocab_size=completion.vocab_size,
        num_supports=NOT_GIVEN if given is None else len(all_sizes),
        num_logprobs=NOT_GIVEN if logprobs is None else len(logprobs[0]),
        token_ids=token_ids,
        trains=np.ones(num_tokens, np.bool_) if trains is None else pieces.fitted(trains, num_tokens, True),
        support_sizes=sizes,
        support_ids=ids[:num_ids],
        logprobs=np.full(num_tokens, np.nan) if logprobs is None else pieces.fitted(logprobs[0], num_tokens, np.nan),
        has_logprob=np.zeros(num_tokens, np.bool_)
        if logprobs is None
        else pieces.fitted(logprobs[1], num_tokens, False),
        full_logprobs=None if full is None else pieces.fitted(full[0], num_tokens, np.nan),
        kept_logprobs=None if kept is None else kept[:num_ids],
        logits=_logits(completion.logits, num_tokens, problems),
        problems=tuple(problems),
    )


def _numbers(
    given: Any, field: str, problems: list[Problem]
) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]] | None:
    return None if given is None else values.numbers(given, field, problems)


def _logits(given: Any, num_tokens: int, problems: list[Problem]) -> Float[np.ndarray, "T V"] | None:
    if given is None:
        return None
    is_table = isinstance(given, np.ndarray) and given.ndim == 2 and given.dtype.kind == "f"
    if not is_table or len(given) != num_tokens:
        problems.append(Problem(WHOLE_ROW, "logits", f"they must be floats for each of {num_tokens} tokens"))
        return None
    return given


def _joined(parts: list[np.ndarray], dtype: type) -> Shaped[np.ndarray, " N"]:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _joined_if_any(parts: list[tuple[np.ndarray | None, int]]) -> Any:
    """The parts one after another, NaN for those that are not there; None where none is, or where they differ."""
    shapes = {part.shape[1:] for part, _ in parts if part is not None}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    return np.concatenate([np.full((length, *shape), np.nan) if part is None else part for part, length in parts])
