"""Sums and differences: a prompt is "47+8=", its answer "55.". Made and scored on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxmask import Rollout
from train.tasks.base import Prompts, Rewards
from train.tasks.digits import joined, read_numbers, sign_of, written

ALPHABET = "0123456789+-=."
PLUS, MINUS, EQUALS, END = (ALPHABET.index(sign) for sign in "+-=.")
# Sums of two numbers stay within 32 bits.
MAX_NUM_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The reward is the share of the answer's places that hold the right token; exact when all do.

    The places are those of the answer written out: a minus where it is negative, its digits, and the end ".". An answer
    that goes on or ends too soon so lacks the end's place.

    Attributes:
      num_digits: of the longest numbers, in [1, 8]; each number has 1 to num_digits of them, all as likely.
    """

    num_digits: int = 2

    def __post_init__(self) -> None:
        """Checks the range."""
        if not (isinstance(self.num_digits, int) and 1 <= self.num_digits <= MAX_NUM_DIGITS):
            raise ValueError(f"num_digits must be an integer in [1, {MAX_NUM_DIGITS}], got {self.num_digits!r}.")

    @property
    def vocab_size(self) -> int:
        """Ten digits, plus, minus, the sign of equality and the end."""
        return len(ALPHABET)

    @property
    def prompt_width(self) -> int:
        """Two numbers and two signs."""
        return 2 * self.num_digits + 2

    @property
    def answer_width(self) -> int:
        """The longest answer: a minus or a carried one, the digits, the end."""
        return self.num_digits + 2

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end."""
        return (END,)

    def prompts(self, key: Key[Array, ""], num: int) -> Prompts:
        """Uniform numbers of uniform numbers of digits, added or subtracted as likely."""
        for_digits, for_numbers, for_signs = jax.random.split(key, 3)
        num_digits = jax.random.randint(for_digits, (2, num), 1, self.num_digits + 1, jnp.int32)
        high = jnp.int32(10) ** num_digits
        low = jnp.where(num_digits == 1, 0, high // 10)
        first, second = jax.random.randint(for_numbers, (2, num), low, high, jnp.int32)
        is_sum = jax.random.bernoulli(for_signs, shape=(num,))
        parts = [
            written(first, self.num_digits),
            sign_of(PLUS, is_sum),
            sign_of(MINUS, ~is_sum),
            written(second, self.num_digits),
            sign_of(EQUALS, jnp.ones(num, jnp.bool_)),
        ]
        token_ids, lengths = joined(parts, END)
        return Prompts(token_ids[:, : self.prompt_width], lengths)

    def answers(self, prompt_ids: Int[Array, "P S"], lengths: Int[Array, " P"]) -> tuple[Array, Array]:
        """The right answers [P, answer_width], padded with the end, and their lengths [P], the end counted."""
        first, second = read_numbers(prompt_ids, lengths, 2).T
        is_sum = (prompt_ids == PLUS).any(axis=1)
        value = jnp.where(is_sum, first + second, first - second)
        parts = [
            sign_of(MINUS, value < 0),
            written(jnp.abs(value), self.num_digits + 1),
            sign_of(END, jnp.ones(value.shape, jnp.bool_)),
        ]
        token_ids, widths = joined(parts, END)
        return token_ids[:, : self.answer_width], widths

    def score(self, rollout: Rollout) -> Rewards:
        """Place by place; places that were not generated are wrong."""
        answers, lengths = (
            jnp.repeat(part, rollout.group_size, axis=0)
            for part in self.answers(rollout.prompt_ids, rollout.prompt_lengths)
        )
        missing = max(self.answer_width - rollout.token_ids.shape[1], 0)
        generated = jnp.where(rollout.loss_mask, rollout.token_ids, -1)
        generated = jnp.pad(generated, ((0, 0), (0, missing)), constant_values=-1)[:, : self.answer_width]
        is_place = jnp.arange(self.answer_width, dtype=jnp.int32)[None, :] < lengths[:, None]
        num_right = ((generated == answers) & is_place).sum(axis=1, dtype=jnp.int32)
        return Rewards(num_right.astype(jnp.float32) / lengths.astype(jnp.float32), num_right == lengths)

    def show(self, token_ids: Sequence[int]) -> str:
        """The characters of the ids."""
        return "".join(ALPHABET[token_id] for token_id in token_ids)
