"""Scores of completions: the weighted sum of reward functions, some of which may hang, raise or die."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from train.rewards.pool import Call, Failure, FunctionPool
from train.rewards.specs import ANSWER, RewardSpec
from train.rewards.verifiers import Verifier

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of completions.

    Attributes:
      values: the weighted sums.
      is_exact: whether the task's verifier gave full marks.
      details: "rewards/NAME", the mean of each function; "rewards/num_failed", scores that no function gave, so 0
        stands for them; "rewards/num_timeouts", those of them whose function took too long.
    """

    values: Float[np.ndarray, " B"]
    is_exact: Bool[np.ndarray, " B"]
    details: Mapping[str, float]


class RewardRunner:
    """Runs reward functions.

    Completions go to a function prompt by prompt, those of one group together. Where a call fails, its completions go
    again one by one, so that one bad completion costs its neighbours nothing; those that fail again score 0. The
    scores do not depend on the number of workers.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        verifier: Verifier,
        *,
        columns: Sequence[str],
        num_workers: int,
        timeout: float,
    ):
        """A runner; has worker processes, unless the verifier is all there is to run and needs none.

        Args:
          specs: functions and their weights.
          verifier: the function "answer"; runs also where no spec names it, for `is_exact`.
          columns: names of the data's columns.
          num_workers: processes.
          timeout: seconds of one call.
        Raises:
          ValueError: a function cannot be loaded, or asks for a column that is not there.
        """
        self._weights = {ANSWER: 0.0} | {spec.name: spec.weight for spec in specs}
        self._verifier = verifier
        targets: dict[str, str | Callable[..., Any]] = {
            spec.name: _absolute(spec.target) for spec in specs if spec.target != ANSWER
        }
        if not verifier.is_quick:
            targets[ANSWER] = verifier
        self._warned: set[str] = set()
        self._pool: FunctionPool | None = None
        if targets:
            self._pool = FunctionPool(targets, num_workers=num_workers, timeout=timeout, imports=verifier.imports)
            self._pool.check(columns)
        self._pooled = tuple(targets)

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        group_size: int,
    ) -> Scores:
        """The scores of completions; those of a prompt lie side by side.

        Args:
          prompts: one per completion, as the columns' values.
          completions: texts.
          columns: of the data.
          group_size: completions per prompt; divides their number.
        """
        chunks = [range(start, start + group_size) for start in range(0, len(completions), group_size)]
        calls = [_call(name, rows, prompts, completions, columns) for name in self._pooled for rows in chunks]
        scores = {name: np.zeros(len(completions)) for name in self._weights}
        failures = self._fill(scores, calls)
        again = [
            _call(call.name, range(row, row + 1), prompts, completions, columns)
            for call, _ in failures
            for row in call.rows
        ]
        final = self._fill(scores, again)
        self._warn([failure for _, failure in final])
        if ANSWER not in self._pooled:
            named = {name: list(values) for name, values in columns.items()}
            scores[ANSWER][:] = self._verifier(prompts, completions, **named)
        values = sum((scores[name] * weight for name, weight in self._weights.items()), np.zeros(len(completions)))
        details = {f"rewards/{name}": float(score.mean()) for name, score in scores.items()}
        details["rewards/num_failed"] = float(len(final))
        details["rewards/num_timeouts"] = float(sum(failure.kind == "timed out" for _, failure in final))
        return Scores(values.astype(np.float32), scores[ANSWER] >= 1, details)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def _fill(self, scores: Mapping[str, np.ndarray], calls: Sequence[Call]) -> list[tuple[Call, Failure]]:
        if not calls or self._pool is None:
            return []
        failures = []
        for call, outcome in zip(calls, self._pool.run(calls), strict=True):
            if isinstance(outcome, Failure):
                failures.append((call, outcome))
            else:
                scores[call.name][call.rows.start : call.rows.stop] = outcome
        return failures

    def _warn(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            if failure.kind not in self._warned:
                self._warned.add(failure.kind)
                _LOG.warning("a reward function %s (%s); such scores are 0", failure.kind, failure.reason)


def _absolute(target: str) -> str:
    place, _, name = target.rpartition(":")
    return f"{Path(place).absolute()}:{name}" if place.endswith(".py") else target


def _call(
    name: str,
    rows: range,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> Call:
    cut = slice(rows.start, rows.stop)
    named = {column: list(values[cut]) for column, values in columns.items()}
    return Call(name, rows, list(prompts[cut]), list(completions[cut]), named)
