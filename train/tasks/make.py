"""The task that a configuration names."""

from __future__ import annotations

from models import Tokenizer
from train.data_config import DataConfig
from train.tasks.base import DeviceTask, HostTask
from train.tasks.options import DEVICE_TASKS, parse_options
from train.tasks.text import TextTask


def device_task(data: DataConfig) -> DeviceTask | None:
    """The task on the device; None where the task is of text."""
    if data.task not in DEVICE_TASKS:
        return None
    task: DeviceTask = DEVICE_TASKS[data.task](**parse_options(data.task, data.task_options))
    return task


def text_task(data: DataConfig, tokenizer: Tokenizer, *, seed: int) -> HostTask:
    """The task of text; `close` it in the end.

    Args:
      data: the task's settings.
      tokenizer: the model's, with a chat template.
      seed: of the data and their order.
    Raises:
      ValueError: the tokenizer has no chat template, a file is not what it should be, or a reward function cannot be
        used.
      OSError: a file cannot be read.
    """
    return TextTask(data, tokenizer, seed=seed)
