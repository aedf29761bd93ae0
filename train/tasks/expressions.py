"""Expressions of numbers, "+", "-" and "*", read token by token inside compiled programs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from train.tasks.digits import BASE

SIGNS = "0123456789+-*,>=."
PLUS, MINUS, TIMES, COMMA, TARGET, EQUALS, END = (SIGNS.index(sign) for sign in "+-*,>=.")
# Longer literals than any prompt's; their values stop here, far from the end of 32 bits.
MAX_LITERAL = 10**7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Expressions:
    """What rows of tokens say.

    Attributes:
      is_well_formed: numbers with operations between them, and an end.
      uses_numbers: each given number is written exactly once, and no other; meaningless where not well formed.
      value: wrapped to 32 bits; meaningless where not well formed.
    """

    is_well_formed: Bool[Array, " B"]
    uses_numbers: Bool[Array, " B"]
    value: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Reader:
    """Rows read so far: total + product is the value of what is complete, the product being the open one.

    Attributes:
      total: of the closed products.
      product: open, with its sign; what the next number multiplies.
      number: being written.
      num_digits: of that number.
      is_used: which of the given numbers were written.
      is_foreign: whether another one was.
      is_wrong: whether what was read is no beginning of an expression.
      is_over: whether the end was read.
    """

    total: Int[Array, " B"]
    product: Int[Array, " B"]
    number: Int[Array, " B"]
    num_digits: Int[Array, " B"]
    is_used: Bool[Array, "B N"]
    is_foreign: Bool[Array, " B"]
    is_wrong: Bool[Array, " B"]
    is_over: Bool[Array, " B"]


def read_expressions(
    token_ids: Int[Array, "B T"], token_mask: Bool[Array, "B T"], given: Int[Array, "B N"]
) -> Expressions:
    """What rows say, up to their first end.

    Args:
      token_ids: ids of SIGNS.
      token_mask: cells that are tokens; others end a row without an end.
      given: the numbers that may be used.
    """
    zeros, no = jnp.zeros(given.shape[0], jnp.int32), jnp.zeros(given.shape[0], jnp.bool_)
    start = _Reader(zeros, zeros + 1, zeros, zeros, jnp.zeros(given.shape, jnp.bool_), no, no, no)

    def step(reader: _Reader, column: tuple[Array, Array]) -> tuple[_Reader, None]:
        return _read(reader, *column, given), None

    last, _ = jax.lax.scan(step, start, (token_ids.T, token_mask.T))
    return Expressions(last.is_over & ~last.is_wrong, last.is_used.all(axis=1) & ~last.is_foreign, last.total)


def _read(reader: _Reader, token: Array, is_token: Array, given: Array) -> _Reader:
    is_read = is_token & ~reader.is_over
    is_digit = is_read & (token < BASE)
    # A number is over at an operation and at the end; there must be one.
    is_sign = is_read & ((token == PLUS) | (token == MINUS) | (token == TIMES) | (token == END))
    is_zero_first = is_digit & (reader.num_digits == 1) & (reader.number == 0)
    is_wrong = (is_read & ~is_digit & ~is_sign) | is_zero_first | (is_sign & (reader.num_digits == 0))
    # The first given number of that value which is free: equal numbers may each be used once.
    is_free = (given == reader.number[:, None]) & ~reader.is_used
    is_its = is_free & (jnp.cumsum(is_free, axis=1, dtype=jnp.int32) == 1)
    product = reader.product * reader.number
    is_closed = is_sign & (token != TIMES)
    number = jnp.minimum(reader.number * BASE + token, MAX_LITERAL)
    return _Reader(
        total=jnp.where(is_closed, reader.total + product, reader.total),
        product=jnp.where(is_closed, jnp.where(token == MINUS, -1, 1), jnp.where(is_sign, product, reader.product)),
        number=jnp.where(is_digit, number, jnp.where(is_sign, 0, reader.number)),
        num_digits=jnp.where(is_digit, reader.num_digits + 1, jnp.where(is_sign, 0, reader.num_digits)),
        is_used=reader.is_used | (is_its & is_sign[:, None]),
        is_foreign=reader.is_foreign | (is_sign & ~is_free.any(axis=1)),
        is_wrong=reader.is_wrong | is_wrong,
        is_over=reader.is_over | (is_sign & (token == END)),
    )


def evaluate(numbers: Int[Array, "*B N"], operations: Int[Array, "*B M"]) -> Int[Array, "*B"]:
    """The values of numbers with operations between them: 0 adds, 1 subtracts, 2 multiplies (and comes first)."""
    total, product = jnp.zeros(numbers.shape[:-1], jnp.int32), numbers[..., 0]
    for place in range(operations.shape[-1]):
        operation, number = operations[..., place], numbers[..., place + 1]
        is_product = operation == 2
        total = jnp.where(is_product, total, total + product)
        product = jnp.where(is_product, product * number, jnp.where(operation == 1, -number, number))
    return total + product
