"""Sums of two one-digit numbers as text: reasoning-gym's `chain_sum`, asked through the model's chat template."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from models import Tokenizer
from train.tasks.base import Prompts, Rewards

INSTRUCTION = "Answer with the number only."
# reasoning-gym makes entry i from (seed, i), so a large size costs nothing and no prompt comes twice for long.
NUM_ENTRIES = 1_000_000
_INTEGER = re.compile(r"-?\d+")


class ChainSum:
    """The reward is 1 where the last integer of the completion is the answer, else 0."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int, num_terms: int = 2, num_digits: int = 1):
        """A stream of problems; `seed` picks the stream."""
        self._tokenizer = tokenizer
        self._entries = _reasoning_gym().create_dataset(
            "chain_sum",
            min_terms=num_terms,
            max_terms=num_terms,
            min_digits=num_digits,
            max_digits=num_digits,
            seed=seed,
            size=NUM_ENTRIES,
        )
        longest = max(len(self._encode(self._entries[index])) for index in range(64))
        # One width for every iteration, so the programs compile once; a few cells for longer numbers than those seen.
        self.prompt_width = longest + 2 * num_terms

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's."""
        return tuple(self._tokenizer.eos_token_ids)

    def prompts(self, step: int, num: int) -> tuple[Prompts, list[Any]]:
        """Entries step * num to step * num + num - 1 of the stream."""
        entries = [self._entries[(step * num + i) % NUM_ENTRIES] for i in range(num)]
        rows = [self._encode(entry) for entry in entries]
        token_ids = np.zeros((num, self.prompt_width), np.int32)
        for cells, row in zip(token_ids, rows, strict=True):
            cells[: len(row)] = row
        return Prompts(token_ids, np.array([len(row) for row in rows], np.int32)), entries

    def score(self, entries: Sequence[Any], completions: Sequence[Sequence[int]], group_size: int) -> Rewards:
        """1 or 0 for each completion."""
        is_right = [
            last_integer(self._tokenizer.decode(completion)) == int(entries[row // group_size]["answer"])
            for row, completion in enumerate(completions)
        ]
        return Rewards(np.array(is_right, np.float32), np.array(is_right, np.bool_))

    def show(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _encode(self, entry: dict[str, Any]) -> list[int]:
        message = {"role": "user", "content": f"{entry['question']} {INSTRUCTION}"}
        return self._tokenizer.encode(self._tokenizer.apply_chat_template([message]))


def _reasoning_gym() -> Any:
    # Imported where it is used: it takes seconds, and one of its dependencies warns about its own syntax.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


def last_integer(text: str) -> int | None:
    """The last integer written in a text, or None."""
    found = _INTEGER.findall(text)
    return int(found[-1]) if found else None
