"""Sort digits: a prompt is some digits and ">", its answer the same digits in order. Made and scored on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxmask import Rollout
from train.tasks.base import Prompts, Rewards

ALPHABET = "0123456789>"
ARROW = ALPHABET.index(">")
MAX_NUM_DIGITS = 1000


@dataclasses.dataclass(frozen=True)
class SortDigits:
    """The reward is the share of places that hold the right digit; exact when all do.

    Attributes:
      num_digits: digits to sort, at least 2; completions have this many tokens.
    """

    num_digits: int = 5

    def __post_init__(self) -> None:
        """Checks the range."""
        if not (isinstance(self.num_digits, int) and 2 <= self.num_digits <= MAX_NUM_DIGITS):
            raise ValueError(f"num_digits must be an integer in [2, {MAX_NUM_DIGITS}], got {self.num_digits!r}.")

    @property
    def vocab_size(self) -> int:
        """Ten digits and the arrow."""
        return len(ALPHABET)

    @property
    def prompt_width(self) -> int:
        """The digits and the arrow."""
        return self.num_digits + 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None: an answer ends at its length."""
        return ()

    def prompts(self, key: Key[Array, ""], num: int) -> Prompts:
        """Uniform digits, then the arrow."""
        digits = jax.random.randint(key, (num, self.num_digits), 0, 10, jnp.int32)
        arrow = jnp.full((num, 1), ARROW, jnp.int32)
        return Prompts(jnp.concatenate([digits, arrow], axis=1), jnp.full(num, self.num_digits + 1, jnp.int32))

    def score(self, rollout: Rollout) -> Rewards:
        """Place by place against the sorted prompt; places that were not generated are wrong."""
        answers = jnp.sort(rollout.prompt_ids[:, : self.num_digits], axis=1)
        answers = jnp.repeat(answers, rollout.group_size, axis=0)
        is_right = (rollout.token_ids[:, : self.num_digits] == answers) & rollout.loss_mask[:, : self.num_digits]
        return Rewards(is_right.mean(axis=1, dtype=jnp.float32), is_right.all(axis=1))

    def show(self, token_ids: Sequence[int]) -> str:
        """The characters of the ids."""
        return "".join(ALPHABET[token_id] for token_id in token_ids)
