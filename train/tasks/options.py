"""Names of tasks and their "key=value" settings."""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from train.rewards.verifiers import import_reasoning_gym
from train.tasks.arithmetic import Arithmetic
from train.tasks.countdown import Countdown
from train.tasks.sorting import SortDigits

DEVICE_TASKS: Mapping[str, type] = MappingProxyType(
    {"sort": SortDigits, "arithmetic": Arithmetic, "countdown": Countdown}
)
GYM_PREFIX = "reasoning-gym:"
TEXT_TASKS = ("chain-sum", "gsm8k")
THINKING = "enable_thinking"
# The run's seed picks the entries, and their number is settled.
_NOT_OPTIONS = ("seed", "size")


def check_name(task: str) -> None:
    """Makes sure that a task is known.

    Raises:
      ValueError: it is not; the message lists those there are, or for reasoning-gym names like it.
    """
    if task in DEVICE_TASKS or task in TEXT_TASKS:
        return
    known = (*DEVICE_TASKS, *TEXT_TASKS, GYM_PREFIX + "NAME")
    if not task.startswith(GYM_PREFIX):
        raise ValueError(f"task must be one of {', '.join(known)}, got {task!r}.")
    name, names = task.removeprefix(GYM_PREFIX), gym_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
        hint = f"like {', '.join(near)}" if near else f"such as {', '.join(names[:5])}"
        raise ValueError(f"task must name one of reasoning-gym's {len(names)} data sets, {hint}; got {task!r}.")


def gym_names() -> list[str]:
    """The names of reasoning-gym's data sets, sorted."""
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def allowed_options(task: str) -> tuple[str, ...]:
    """The keys that a task's options may have."""
    if task in DEVICE_TASKS:
        return tuple(field.name for field in dataclasses.fields(DEVICE_TASKS[task]))
    if not task.startswith(GYM_PREFIX):
        return (THINKING,)
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    config = DATASETS[task.removeprefix(GYM_PREFIX)][1]
    fields = [field.name for field in dataclasses.fields(config) if field.init and field.name not in _NOT_OPTIONS]
    return (THINKING, *fields)


def parse_options(task: str, entries: Sequence[str]) -> dict[str, Any]:
    """The values of "key=value" entries: Python's literals, true and false, else text.

    Raises:
      ValueError: an entry is written otherwise, a key comes twice or is unknown; the message lists what there is.
    """
    options: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals:
            raise ValueError(f"task_options must be written key=value, got {entry!r}.")
        if key in options:
            raise ValueError(f"task_options must name {key!r} once, got {entry!r} too.")
        allowed = allowed_options(task)
        if key not in allowed:
            raise ValueError(f"task_options of {task} must be among {', '.join(allowed)}, got {entry!r}.")
        options[key] = _value(text)
    return options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
