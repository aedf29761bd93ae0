"""A task of text: questions asked through the model's chat template, replies scored by reward functions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models import Tokenizer
from train.data import Cursor, Encoded, Example, PromptStream
from train.data_config import DataConfig
from train.rewards import RewardRunner, parse_rewards
from train.tasks.base import Prompts, Rewards, Scored
from train.tasks.options import THINKING, parse_options
from train.tasks.sources import Source, source_of


@dataclasses.dataclass(frozen=True)
class Entry:
    """What scoring needs to know of a prompt.

    Attributes:
      prompt: what was asked, instruction included, without the chat template.
      columns: of the data.
    """

    prompt: str
    columns: Mapping[str, Any]


class TextTask:
    """Prompts are "question instruction" as a user's message; rewards are those of `train.rewards`.

    Reward functions get the texts without special tokens, and every column of the data once per completion.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, *, seed: int):
        """A task; starts worker processes where its rewards need them.

        Args:
          data: the task's settings.
          tokenizer: the model's, with a chat template.
          seed: of the data and their order.
        Raises:
          ValueError: the tokenizer has no chat template, a file is not what it should be, or a reward function cannot
            be used.
          OSError: a file cannot be read.
        """
        self._tokenizer = tokenizer
        self._source = source_of(data, seed)
        self._instruction = self._source.instruction if data.instruction is None else data.instruction
        options = parse_options(data.task, data.task_options)
        self._template = {THINKING: options[THINKING]} if THINKING in options else {}
        self.prompt_width = self._width(data.max_prompt_length)
        self._stream = PromptStream(
            self._source.training,
            self._encode,
            max_length=self.prompt_width,
            seed=seed,
            is_shuffled=self._source.is_shuffled,
            is_left_out=self._source.is_held_out,
        )
        self._held_out: dict[int, list[Encoded]] = {}
        self._runner = RewardRunner(
            parse_rewards(data.rewards),
            self._source.verifier,
            columns=sorted(self._source.training[0].columns),
            num_workers=data.reward_workers,
            timeout=data.reward_timeout,
        )

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's."""
        return tuple(self._tokenizer.eos_token_ids)

    @property
    def num_too_long(self) -> int:
        """Prompts passed over for their length so far."""
        return self._stream.num_too_long

    def draw(self, cursor: Cursor, num: int) -> tuple[Prompts, list[Entry], Cursor]:
        """See `HostTask.draw`.

        Raises:
          ValueError: no prompt of an epoch fits max_prompt_length.
        """
        taken, cursor = self._stream.take(cursor, num)
        return (*self._prompts(taken), cursor)

    def held_out(self, num: int) -> tuple[Prompts, list[Entry]]:
        """See `HostTask.held_out`.

        Raises:
          ValueError: there are none that fit max_prompt_length.
        """
        # Looked for once: some data take seconds to make.
        if num not in self._held_out:
            encoded = (Encoded(example, self._encode(example)) for example in self._source.held_out_examples(num))
            fitting = (one for one in encoded if len(one.token_ids) <= self.prompt_width)
            self._held_out[num] = list(itertools.islice(fitting, num))
        taken = self._held_out[num]
        if not taken:
            raise ValueError(f"no held-out prompt has at most max_prompt_length={self.prompt_width} tokens.")
        return self._prompts(taken)

    def score(self, entries: Sequence[Entry], completions: Sequence[Sequence[int]], group_size: int) -> Scored:
        """See `HostTask.score`."""
        repeated = [entry for entry in entries for _ in range(group_size)]
        texts = [self._tokenizer.decode(completion) for completion in completions]
        names = dict.fromkeys(name for entry in entries for name in entry.columns)
        columns = {name: [entry.columns.get(name) for entry in repeated] for name in names}
        scores = self._runner.score([entry.prompt for entry in repeated], texts, columns, group_size)
        return Scored(Rewards(scores.values, scores.is_exact), scores.details)

    def show(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def close(self) -> None:
        """Ends the worker processes."""
        self._runner.close()

    def _asked(self, example: Example) -> str:
        return f"{example.question.rstrip()} {self._instruction}".rstrip()

    def _encode(self, example: Example) -> list[int]:
        message = {"role": "user", "content": self._asked(example)}
        return self._tokenizer.encode_chat([message], **self._template)

    def _width(self, max_length: int | None) -> int:
        source: Source = self._source
        if max_length is not None and source.num_measured is not None:
            return max_length
        num = len(source.training) if source.num_measured is None else source.num_measured
        longest = max(len(self._encode(source.training[index])) for index in range(num))
        # One width for every iteration, so the programs compile once.
        needed = longest + source.spare
        return needed if max_length is None else min(max_length, needed)

    def _prompts(self, taken: Sequence[Encoded]) -> tuple[Prompts, list[Entry]]:
        token_ids = np.zeros((len(taken), self.prompt_width), np.int32)
        for cells, one in zip(token_ids, taken, strict=True):
            cells[: len(one.token_ids)] = one.token_ids
        lengths = np.array([len(one.token_ids) for one in taken], np.int32)
        return Prompts(token_ids, lengths), [Entry(self._asked(one.example), one.example.columns) for one in taken]
