"""Where the prompts of text come from: training examples, held-out ones, and what they are asked with."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import zlib
from collections.abc import Iterator
from typing import Any

from train.data import Example, Examples
from train.data_config import DataConfig
from train.rewards.verifiers import LastInteger, MathAnswer, ReasoningGymAnswer, Verifier, create_gym
from train.tasks.json_lines import read_examples, split
from train.tasks.options import GYM_PREFIX, THINKING, parse_options

NUMBER_ONLY = "Answer with the number only."
BOXED = "Think step by step, and write the final number within \\boxed{}."
TAGGED = "Write your final answer between <answer> and </answer>."
# reasoning-gym makes entry i from (seed, i), so a large size costs nothing and no prompt comes twice for long.
NUM_ENTRIES = 1_000_000
# These make all their entries at once (0.25 ms each), or refuse more.
FEWER_ENTRIES = {"acre": 4_000, "word_ladder": 20_000}
# These walk through sets, whose order Python draws anew in every process.
UNSTABLE = (
    "codeio",
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
# One question in so many is held out, by its own text: one that comes again, in whatever run, is held out again.
HELD_OUT_SHARE = 8
# Examples looked at per held-out one, before a data set is taken to have no more questions.
MAX_TRIES = 8 * HELD_OUT_SHARE

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a task of text asks.

    Attributes:
      training: examples, held-out ones among them where `is_held_out` says so.
      held_out: others; None: the held-out questions among `training`, looked for from its end.
      verifier: the reward function "answer".
      instruction: for the reply.
      is_shuffled: whether each epoch has its own order.
      num_measured: examples whose prompts the width is measured on; None: all.
      spare: tokens that other prompts may have beyond those.
    """

    training: Examples
    held_out: Examples | None
    verifier: Verifier
    instruction: str
    is_shuffled: bool = True
    num_measured: int | None = None
    spare: int = 0

    def is_held_out(self, example: Example) -> bool:
        """Whether a training example must not be trained on."""
        return self.held_out is None and zlib.crc32(example.question.encode()) % HELD_OUT_SHARE == 0

    def held_out_examples(self, num: int) -> Iterator[Example]:
        """The held-out examples in order, no question twice; at most `num` of them where data are generated."""
        if self.held_out is not None:
            yield from (self.held_out[index] for index in range(len(self.held_out)))
            return
        seen: set[str] = set()
        for index in itertools.islice(reversed(range(len(self.training))), MAX_TRIES * num):
            example = self.training[index]
            if self.is_held_out(example) and example.question not in seen:
                seen.add(example.question)
                yield example


@dataclasses.dataclass(frozen=True)
class GymExamples:
    """The entries of a reasoning-gym data set."""

    dataset: Any

    def __len__(self) -> int:
        """How many it can make."""
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Example:
        """Entry `index`, with the columns "question", "answer" and "metadata"."""
        entry = self.dataset[index]
        return Example(entry["question"], {name: entry[name] for name in ("question", "answer", "metadata")})


def source_of(data: DataConfig, seed: int) -> Source:
    """What a task of text asks.

    Args:
      data: names the task.
      seed: of generated data.
    Raises:
      ValueError: a file is not what it should be.
      OSError: it cannot be read.
    """
    if data.task == "gsm8k":
        return _json_lines(data)
    if data.task == "chain-sum":
        one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        dataset = create_gym("chain_sum", tuple(one_digit.items()), seed=seed, size=NUM_ENTRIES)
        # In the order they are made in, which is random as it is.
        return Source(GymExamples(dataset), None, LastInteger(), NUMBER_ONLY, False, num_measured=64, spare=4)
    name = data.task.removeprefix(GYM_PREFIX)
    options = parse_options(data.task, data.task_options)
    options.pop(THINKING, None)
    fixed = tuple(options.items())
    if name in UNSTABLE and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        _LOG.warning("%s repeats its prompts in another process only with PYTHONHASHSEED set to a number", data.task)
    dataset = create_gym(name, fixed, seed=seed, size=FEWER_ENTRIES.get(name, NUM_ENTRIES))
    return Source(GymExamples(dataset), None, ReasoningGymAnswer(name, fixed), TAGGED, num_measured=32, spare=32)


def _json_lines(data: DataConfig) -> Source:
    if data.train_file is None:
        raise ValueError("train_file must be a file of JSON lines with task 'gsm8k', got None.")
    training = read_examples(data.train_file)
    training, held_out = split(training, None if data.eval_file is None else read_examples(data.eval_file))
    return Source(training, held_out, MathAnswer(), BOXED)
