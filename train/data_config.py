"""What a run trains on and how it is rewarded: frozen, plain values, checked."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Task, data and rewards.

    Attributes:
      task: "sort", "arithmetic" or "countdown" (made and scored on the device); or of text: "chain-sum" (sums of two
        one-digit numbers), "gsm8k" (JSON lines of `train_file`) or "reasoning-gym:NAME", any of its data sets.
      task_options: "key=value" settings of the task, as num_digits=4; for reasoning-gym the fields of the data set's
        configuration. Tasks of text take enable_thinking=true or false, for chat templates that know it.
      train_file: for gsm8k: JSON lines with "question" and "answer", which ends in "#### 42" or is the number.
      eval_file: held-out lines of the same kind; None: the last tenth of train_file, at most 500.
      instruction: appended to each question; None: the task's own.
      max_prompt_length: tokens; longer prompts are passed over; at least 1; None: what the task's prompts need.
      rewards: "answer" (the task's verifier), "package.module:function" or "file.py:function", each with an optional
        weight, as "answer=0.5"; tasks on the device have their own.
      reward_workers: processes that run reward functions, at least 1.
      reward_timeout: seconds of one function on the completions of one prompt, > 0.
    """

    task: str = "sort"
    task_options: tuple[str, ...] = ()
    train_file: str | None = None
    eval_file: str | None = None
    instruction: str | None = None
    max_prompt_length: int | None = None
    rewards: tuple[str, ...] = ("answer",)
    reward_workers: int = 2
    reward_timeout: float = 10.0

    def __post_init__(self) -> None:
        """Checks every field."""
        # Here, since the tasks take their settings from this class.
        from train.tasks.check import check_data

        check_data(self)
        if not (self.max_prompt_length is None or self.max_prompt_length >= 1):
            raise ValueError(f"max_prompt_length must be at least 1, got {self.max_prompt_length}.")
        if not self.reward_workers >= 1:
            raise ValueError(f"reward_workers must be at least 1, got {self.reward_workers}.")
        if not 0 < self.reward_timeout < math.inf:
            raise ValueError(f"reward_timeout must be > 0 and finite, got {self.reward_timeout}.")
