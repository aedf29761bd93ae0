"""Checks of what a configuration says of tasks, data and rewards."""

from __future__ import annotations

from train.data_config import DataConfig
from train.rewards.specs import ANSWER, parse_rewards
from train.rewards.verifiers import create_gym
from train.tasks.options import DEVICE_TASKS, GYM_PREFIX, THINKING, check_name, parse_options


def check_data(data: DataConfig) -> None:
    """Makes sure that task, options, files and rewards go together.

    Raises:
      ValueError: they do not; the message names the field, its value and what it may be.
    """
    check_name(data.task)
    options = parse_options(data.task, data.task_options)
    thinking = options.pop(THINKING, False)
    if not isinstance(thinking, bool):
        raise ValueError(f"task_options {THINKING} must be true or false, got {thinking!r}.")
    parse_rewards(data.rewards)
    if data.task in DEVICE_TASKS:
        DEVICE_TASKS[data.task](**options)
        if data.rewards != (ANSWER,):
            raise ValueError(f"rewards must be {ANSWER!r} with task {data.task!r}, got {', '.join(data.rewards)}.")
        if data.max_prompt_length is not None or data.instruction is not None:
            raise ValueError(f"max_prompt_length and instruction must be None with task {data.task!r}.")
    elif data.task.startswith(GYM_PREFIX):
        create_gym(data.task.removeprefix(GYM_PREFIX), tuple(options.items()), seed=0, size=1)
    if (data.train_file is None) == (data.task == "gsm8k"):
        needs = "a file of JSON lines" if data.task == "gsm8k" else "None"
        raise ValueError(f"train_file must be {needs} with task {data.task!r}, got {data.train_file!r}.")
    if data.eval_file is not None and data.task != "gsm8k":
        raise ValueError(f"eval_file must be None with task {data.task!r}, got {data.eval_file!r}.")
