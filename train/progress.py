"""Where a run stands: the learner's state, and what the host knows beside it. Checkpoints hold all of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxmask import Rollout
from train.run_config import EvaluationConfig
from train.state import TrainState
from train.tasks.base import Cursor

START = Cursor()


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the host knows of a run, as plain numbers.

    Attributes:
      cursor: where the next prompts are drawn from.
      ahead_cursor: where those of the rollout drawn ahead came from.
      best: highest greedy share of right answers of all evaluations; -1 before the first.
      num_without_gain: evaluations since then.
    """

    cursor: Cursor = START
    ahead_cursor: Cursor = START
    best: float = -1.0
    num_without_gain: int = 0

    def after_evaluation(self, score: float) -> Progress:
        """With one more evaluation, whose greedy share of right answers is `score`."""
        score = _rounded(score)
        if score > self.best:
            return dataclasses.replace(self, best=score, num_without_gain=0)
        return dataclasses.replace(self, num_without_gain=self.num_without_gain + 1)

    def stops(self, evaluation: EvaluationConfig) -> str | None:
        """Why the run should end now; None where it should not."""
        target, patience = evaluation.early_stop_target, evaluation.early_stop_patience
        if target is not None and self.best >= _rounded(target):
            return f"the greedy share of right answers, {self.best:.3f}, has reached early_stop_target {target}"
        if patience and self.num_without_gain >= patience:
            return f"{self.num_without_gain} evaluations without one better than {self.best:.3f}"
        return None


def _rounded(score: float) -> float:
    """As checkpoints hold it, so that a resumed run compares what the unbroken one does."""
    return float(np.float32(score))


NEW = Progress()


@dataclasses.dataclass(frozen=True)
class RunState:
    """Everything that a resumed run needs to go on as the unbroken one.

    Attributes:
      train: the learner.
      progress: beside it.
      ahead: the rollout of the next iteration, where runs overlap it with the rewards of this one; None before the
        first, and in runs that do not.
    """

    train: TrainState
    progress: Progress = NEW
    ahead: Rollout | None = None

    def moved(self, cursor: Cursor) -> RunState:
        """With the next prompts from `cursor` on."""
        return dataclasses.replace(self, progress=dataclasses.replace(self.progress, cursor=cursor))
