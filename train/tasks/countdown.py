"""Countdown: a prompt is "3,7,2>23=", an answer "3*7+2.". Made and scored on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxmask import Rollout
from train.tasks.base import Prompts, Rewards
from train.tasks.digits import joined, read_numbers, sign_of, written
from train.tasks.expressions import COMMA, END, EQUALS, SIGNS, TARGET, evaluate, read_expressions

# Reward of what is an expression, and of one that uses the numbers as it should.
WELL_FORMED, RIGHT_NUMBERS = 0.1, 0.2
# Expressions tried per prompt until one has a target in range; the sum of the numbers always has.
NUM_TRIES = 16


@dataclasses.dataclass(frozen=True)
class Countdown:
    """The reward is 1 where an expression over the prompt's numbers has the target as its value.

    An expression is numbers with "+", "-" or "*" between them, "*" first, then from the left; no signs before numbers,
    no zeros before digits, no parentheses; "." ends it. It must use each of the prompt's numbers exactly once, as in
    TinyZero and in reasoning-gym's countdown. 0.2 where it does but has another value, 0.1 for any other expression,
    0 for what is none or has no end. Every prompt has an answer.

    Attributes:
      num_numbers: in [2, 6].
      max_number: numbers are uniform in [1, max_number].
      max_target: targets are in [1, max_target]; at least num_numbers * max_number.
    """

    num_numbers: int = 3
    max_number: int = 9
    max_target: int = 99

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for field, low, high in (("num_numbers", 2, 6), ("max_number", 1, 999)):
            value = getattr(self, field)
            if not (isinstance(value, int) and low <= value <= high):
                raise ValueError(f"{field} must be an integer in [{low}, {high}], got {value!r}.")
        if self.max_number**self.num_numbers >= 2**31:
            most = int((2**31 - 1) ** (1 / self.num_numbers))
            raise ValueError(
                f"max_number must be at most {most} with num_numbers={self.num_numbers}, so that products fit 32 bits, "
                f"got {self.max_number}."
            )
        least = self.num_numbers * self.max_number
        if not (isinstance(self.max_target, int) and least <= self.max_target <= 10**6):
            raise ValueError(f"max_target must be an integer in [{least}, 1000000], got {self.max_target!r}.")

    @property
    def vocab_size(self) -> int:
        """Ten digits, three operations, comma, target, the sign of equality and the end."""
        return len(SIGNS)

    @property
    def prompt_width(self) -> int:
        """The numbers, each with a sign behind it, the target and the sign of equality."""
        return self.num_numbers * (len(str(self.max_number)) + 1) + len(str(self.max_target)) + 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end."""
        return (END,)

    def prompts(self, key: Key[Array, ""], num: int) -> Prompts:
        """Uniform numbers; the target is the value of a random expression over them in a random order."""
        for_numbers, for_tries = jax.random.split(key)
        numbers = jax.random.randint(for_numbers, (num, self.num_numbers), 1, self.max_number + 1, jnp.int32)
        target = self._targets(for_tries, numbers)
        yes = jnp.ones(num, jnp.bool_)
        parts = []
        for place in range(self.num_numbers):
            sign = TARGET if place == self.num_numbers - 1 else COMMA
            parts += [written(numbers[:, place], len(str(self.max_number))), sign_of(sign, yes)]
        parts += [written(target, len(str(self.max_target))), sign_of(EQUALS, yes)]
        return Prompts(*joined(parts, END))

    def score(self, rollout: Rollout) -> Rewards:
        """See the class; a completion without an end is none."""
        given = read_numbers(rollout.prompt_ids, rollout.prompt_lengths, self.num_numbers + 1)
        given = jnp.repeat(given, rollout.group_size, axis=0)
        read = read_expressions(rollout.token_ids, rollout.loss_mask, given[:, : self.num_numbers])
        uses = read.is_well_formed & read.uses_numbers
        is_exact = uses & (read.value == given[:, self.num_numbers])
        values = jnp.where(read.is_well_formed, WELL_FORMED, 0.0)
        values = jnp.where(uses, RIGHT_NUMBERS, values)
        return Rewards(jnp.where(is_exact, 1.0, values).astype(jnp.float32), is_exact)

    def show(self, token_ids: Sequence[int]) -> str:
        """The characters of the ids."""
        return "".join(SIGNS[token_id] for token_id in token_ids)

    def _targets(self, key: Key[Array, ""], numbers: Int[Array, "P N"]) -> Int[Array, " P"]:
        for_order, for_operations = jax.random.split(key)
        num = numbers.shape[0]
        tried = jnp.broadcast_to(numbers[:, None, :], (num, NUM_TRIES, self.num_numbers))
        tried = jnp.take_along_axis(tried, _random_orders(for_order, tried.shape), axis=2)
        operations = jax.random.randint(for_operations, (num, NUM_TRIES, self.num_numbers - 1), 0, 3, jnp.int32)
        values = evaluate(tried, operations)
        is_in_range = (values >= 1) & (values <= self.max_target)
        first = jnp.take_along_axis(values, is_in_range.argmax(axis=1, keepdims=True), axis=1)[:, 0]
        return jnp.where(is_in_range.any(axis=1), first, numbers.sum(axis=1, dtype=jnp.int32))


def _random_orders(key: Key[Array, ""], shape: tuple[int, ...]) -> Int[Array, "*B N"]:
    """Uniform permutations: the ranks of noise, equal noise ranked by its place."""
    noise: Float[Array, "*B N"] = jax.random.uniform(key, shape, jnp.float32)
    one, other = noise[..., :, None], noise[..., None, :]
    place = jnp.arange(shape[-1], dtype=jnp.int32)
    is_before = (place[:, None] > place[None, :]).reshape((1,) * (len(shape) - 1) + (shape[-1],) * 2)
    return ((other < one) | ((other == one) & is_before)).sum(axis=-1, dtype=jnp.int32)
