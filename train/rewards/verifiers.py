"""What the tasks of text call right: the reward function "answer" of each. They are sent to worker processes."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from train.rewards.answers import extract_answer, last_integer, plain_number

# Python refuses to read longer integers, and no task asks for one.
MAX_DIGITS = 1000


@runtime_checkable
class Verifier(Protocol):
    """The reward function "answer" of a task: 1 is full marks."""

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that take long to import, which a worker should find imported."""
        ...

    @property
    def is_quick(self) -> bool:
        """Whether it can neither hang nor die, and so needs no process of its own."""
        ...

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        """The marks of completions, in [0, 1]; columns hold one value per completion."""
        ...


@dataclasses.dataclass(frozen=True)
class LastInteger:
    """1 where the last integer of the completion is the answer, else 0."""

    imports: tuple[str, ...] = ()
    is_quick: bool = True

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        """See `Verifier`; needs the column "answer"."""
        found = [last_integer(completion) for completion in completions]
        return [
            float(text is not None and len(text) <= MAX_DIGITS and int(text) == int(answer))
            for text, answer in zip(found, columns["answer"], strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class MathAnswer:
    """1 where the completion's answer is the number asked for, written in any way that math-verify reads, else 0.

    The answer is found by `extract_answer`. First the two are compared as they are written (without thousands' commas,
    currency signs, or zeros that say nothing), then by math-verify.
    """

    imports: tuple[str, ...] = ("math_verify",)
    is_quick: bool = False

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        """See `Verifier`; needs the column "answer", the number as text."""
        found = [extract_answer(completion, is_number=True) for completion in completions]
        return [float(is_same_answer(text, answer)) for text, answer in zip(found, columns["answer"], strict=True)]


def is_same_answer(found: str, expected: str) -> bool:
    """Whether an answer is the expected one: as it is written, else by math-verify.

    Source: huggingface/Math-Verify; without its time-outs, which need the main thread.
    """
    if not found:
        return False
    if plain_number(found) == plain_number(expected):
        return True
    import math_verify

    gold, target = (
        math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (plain_number(expected), found)
    )
    return math_verify.verify(gold, target, timeout_seconds=None)


@dataclasses.dataclass(frozen=True)
class ReasoningGymAnswer:
    """What a reasoning-gym data set itself says of an answer, found by `extract_answer`; many give partial marks.

    Some data sets evaluate answers as expressions with sympy, which is Python's `eval`: what a policy writes there is
    run, in a worker process with a time-out and nothing more around it.

    Attributes:
      name: of the data set.
      options: of its configuration, as `create_dataset` takes them.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    imports: tuple[str, ...] = ("reasoning_gym",)
    is_quick: bool = False

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        """See `Verifier`; needs the columns of the data set's entries: "question", "answer" and "metadata"."""
        names = ("question", "answer", "metadata")
        entries = [
            dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)
        ]
        return [
            float(self._dataset.score_answer(extract_answer(completion, is_number=is_number(entry["answer"])), entry))
            for completion, entry in zip(completions, entries, strict=True)
        ]

    @functools.cached_property
    def _dataset(self) -> Any:
        # Scoring reads the configuration, never an entry but the given one.
        return create_gym(self.name, self.options, seed=0, size=1)


def is_number(answer: object) -> bool:
    """Whether an expected answer is a number as texts write one."""
    return isinstance(answer, str) and plain_number(answer).removeprefix("-").replace(".", "", 1).isdecimal()


def create_gym(name: str, options: Sequence[tuple[str, Any]], *, seed: int, size: int) -> Any:
    """A reasoning-gym data set.

    Args:
      name: among its data sets.
      options: fields of the data set's configuration. Those of "composite" are `datasets`: names of others, or a
        mapping from names to their options.
      seed: entry i is a function of seed and i.
      size: entries it can make.
    Raises:
      ValueError: no such data set, or it refuses an option.
    """
    gym = import_reasoning_gym()
    fields: dict[str, Any] = {**dict(options), "seed": seed, "size": size}
    try:
        if "datasets" in fields:
            fields["datasets"] = _specs(fields["datasets"])
        return gym.create_dataset(name, **fields)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"task_options of reasoning-gym:{name} {dict(options)} are refused: {error}.") from error


def _specs(datasets: Any) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec

    names = datasets.split(",") if isinstance(datasets, str) else datasets
    configs = names if isinstance(names, Mapping) else {name: {} for name in names}
    return [DatasetSpec(name.strip(), 1.0, dict(config)) for name, config in configs.items()]


def import_reasoning_gym() -> Any:
    """The package; imported where it is used: it takes seconds, and one of its dependencies warns about its syntax."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym
