"""What a whole GRPO iteration asks of each side.

A side is a class `Rival(folder, max_length, case=..., group_size=...)`, of `generate_case.Case` as plain values, with:
`token_logprobs(token_ids)`, called before the first step; `step()`, one iteration on the prompts of the case, which
returns its sampled tokens and the seconds until the rewards were asked for; and what `process_memory.Measured` has.
"""

import time
from collections.abc import Sequence

# Adam's; so small that 64 tokens remain as random as they were.
LEARNING_RATE = 1e-6
CLIP = 0.2


class Rewards:
    """The share of a completion's ids in the lower half of the vocabulary, and when it was asked for."""

    def __init__(self, vocab_size: int):
        self._middle = vocab_size // 2
        self._begun = 0.0
        self._told: dict[str, float] = {}

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def __call__(self, completions: Sequence[Sequence[int]]) -> list[float]:
        self._told = {"num_tokens": sum(map(len, completions)), "rollout": time.perf_counter() - self._begun}
        return [sum(token_id < self._middle for token_id in ids) / len(ids) for ids in completions]

    def told(self) -> dict[str, float]:
        return self._told
