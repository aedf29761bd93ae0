"""Numbers as tokens, made and read inside compiled programs. A token below 10 is that digit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BASE = 10


def written(numbers: Int[Array, "*B"], width: int) -> tuple[Int[Array, "*B {width}"], Bool[Array, "*B {width}"]]:
    """The digits of numbers, the highest first, and which of them are written: not the zeros before a number.

    Args:
      numbers: in [0, 10^width).
      width: digits.
    """
    powers = BASE ** jnp.arange(width - 1, -1, -1, dtype=jnp.int32)
    above = numbers[..., None] // powers.reshape((1,) * numbers.ndim + (width,))
    is_last = jnp.arange(width, dtype=jnp.int32) == width - 1
    return above % BASE, (above > 0) | is_last.reshape((1,) * numbers.ndim + (width,))


def joined(
    parts: list[tuple[Int[Array, "R _"], Bool[Array, "R _"]]], fill: int
) -> tuple[Int[Array, "R S"], Int[Array, " R"]]:
    """The kept tokens of some parts, one after the other, then `fill`; and how many are kept in each row."""
    tokens = jnp.concatenate([tokens for tokens, _ in parts], axis=1)
    keep = jnp.concatenate([keep for _, keep in parts], axis=1)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # Sums over one-hot cells: a few cells are dearer to sort than to compare, and most of all to compile.
    to = jnp.where(keep, jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1, -1)
    is_its = to[:, :, None] == places[None, None, :]
    found = jnp.where(is_its, tokens[:, :, None], 0).sum(axis=1, dtype=jnp.int32)
    return jnp.where(is_its.any(axis=1), found, fill), keep.sum(axis=1, dtype=jnp.int32)


def sign_of(token: int, keep: Bool[Array, " R"]) -> tuple[Int[Array, "R 1"], Bool[Array, "R 1"]]:
    """A part for `joined`: one token in the rows that keep it."""
    return jnp.full((keep.shape[0], 1), token, jnp.int32), keep[:, None]


def read_numbers(token_ids: Int[Array, "R S"], lengths: Int[Array, " R"], num: int) -> Int[Array, "R {num}"]:
    """The numbers of rows in which anything but a digit ends one, in order; 0 where a row has fewer.

    In: "12,7>5="  Out: [12, 7, 5] for num=3.
    """
    places = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
    is_digit = (token_ids < BASE) & (places[None, :] < lengths[:, None])
    index = jnp.cumsum(~is_digit, axis=1, dtype=jnp.int32)

    def step(numbers: Array, column: tuple[Array, Array, Array]) -> tuple[Array, None]:
        token, is_one, place = column
        is_its = is_one[:, None] & (place[:, None] == jnp.arange(num, dtype=jnp.int32)[None, :])
        return jnp.where(is_its, numbers * BASE + token[:, None], numbers), None

    start = jnp.zeros((token_ids.shape[0], num), jnp.int32)
    return jax.lax.scan(step, start, (token_ids.T, is_digit.T, index.T))[0]
