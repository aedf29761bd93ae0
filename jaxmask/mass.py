"""Probability mass as integers: a sum is the same in every order, on every path and under every sharding.

A weight exp(z), z <= 0, is cut down to a multiple of 2^-36. Sums of floats depend on their order, so a token at the
edge of top-p could fall on either side of it from one program to the next; sums of these integers cannot.
Cutting takes at most V 2^-36 from the mass of a row of V tokens: 4e-6 at V = 262,144, where the likeliest weighs 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

# A weight becomes two floats, one on a grid of 2^-18 and the rest on one of 2^-36: as integers both stay within 2^18,
# so that sums of 64 of them are exact in float32 (2^24), where they vectorise far better than integers do.
_HIGH_BITS = 18
_LOW_BITS = 36
_BLOCK = 64

# Most terms of a sum: limbs of larger ones could overflow.
MAX_TERMS = 2**19 - 1
# Most columns of a running sum, for the same reason.
MAX_COLUMNS = 2**12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mass:
    """A mass in units of 2^-36, as a 64-bit integer: high 2^32 + low."""

    high: UInt[Array, "*B"]
    low: UInt[Array, "*B"]

    def __add__(self, other: Mass) -> Mass:
        """The sum of two."""
        low = self.low + other.low
        return Mass(self.high + other.high + (low < other.low).astype(jnp.uint32), low)

    def __getitem__(self, index: object) -> Mass:
        """The masses at `index` of the axes."""
        return jax.tree.map(lambda word: word[index], self)

    def reaches(self, other: Mass) -> Bool[Array, "*B"]:
        """self >= other."""
        return (self.high > other.high) | ((self.high == other.high) & (self.low >= other.low))

    def share(self, fraction: Float[Array, "*B"]) -> Mass:
        """The least mass that is at least `fraction` of this; the fraction, in (0, 1), is rounded to 24 bits."""
        return self.share_of_units(fraction_units(fraction))

    def share_of_units(self, units: UInt[Array, "*B"]) -> Mass:
        """The least mass that is at least this many 2^-24 of it (see `fraction_units`)."""
        digits = self._digits_times(units)
        has_rest = (digits[0] | digits[1] | digits[2]) > 0
        one = Mass(jnp.zeros_like(self.high), has_rest.astype(jnp.uint32))
        return Mass(_word(digits[7:11]), _word(digits[3:7])) + one

    def times(self, factor: Int[Array, "*B"]) -> Mass:
        """The mass `factor` times; factors below 2^24."""
        digits = self._digits_times(factor.astype(jnp.uint32))
        return Mass(_word(digits[4:8]), _word(digits[0:4]))

    def to_float(self) -> Float[Array, "*B"]:
        """As float32, 1 being the weight of a likeliest token."""
        # Powers of two scale exactly, so this rounds alike wherever a compiler fuses the multiplication and the sum.
        return self.high.astype(jnp.float32) * 2.0 ** (32 - _LOW_BITS) + self.low.astype(jnp.float32) * 2.0**-_LOW_BITS

    def _digits_times(self, factor: UInt[Array, "*B"]) -> list[UInt[Array, "*B"]]:
        """Eleven base-256 digits of the product with a 24-bit factor, least first."""
        digits, carry = [], jnp.zeros_like(factor)
        for word in (self.low, self.high):
            for byte in range(4):
                # (2^24 - 1) (2^8 - 1) and a carry below 2^24 fit 32 bits.
                carry = factor * ((word >> jnp.uint32(8 * byte)) & jnp.uint32(255)) + carry
                digits.append(carry & jnp.uint32(255))
                carry = carry >> jnp.uint32(8)
        return digits + [(carry >> jnp.uint32(8 * byte)) & jnp.uint32(255) for byte in range(3)]


def select(condition: Bool[Array, "*B"], one: Mass, other: Mass) -> Mass:
    """One where the condition holds, the other elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def fraction_units(fraction: Float[Array, "*B"]) -> UInt[Array, "*B"]:
    """A fraction in (0, 1) in units of 2^-24, rounded, at least one unit and less than all."""
    return jnp.clip(jnp.round(fraction * 2.0**24), 1, 2**24 - 1).astype(jnp.uint32)


def parts(z: Float[Array, "*C"]) -> tuple[Int[Array, "*C"], Int[Array, "*C"]]:
    """The weight exp(z) of each token, z <= 0, as two integers of at most 2^18: units of 2^-18, and the rest in 2^-36.

    Sums of up to `MAX_COLUMNS` of each make a mass (`from_sums`).
    """
    high, low = _parts(z)
    return _as_integer(high, _HIGH_BITS), _as_integer(low, _LOW_BITS)


def from_sums(high: Int[Array, "*B"], low: Int[Array, "*B"]) -> Mass:
    """The mass of tokens whose `parts` add up to these sums."""
    return _from_limbs(*_limbs(high), *_limbs(low))


def from_blocks(high: Int[Array, "*B C"], low: Int[Array, "*B C"]) -> Mass:
    """The mass of up to 1024 blocks of tokens, given the sums of `parts` of each block."""
    return _from_limbs(*(part.sum(axis=-1, dtype=jnp.int32) for part in (*_limbs(high), *_limbs(low))))


def total(z: Float[Array, "B C"], all_shards: Callable[[Int[Array, " B"]], Int[Array, " B"]] = lambda x: x) -> Mass:
    """The mass of each row; -inf weighs nothing.

    Args:
      z: at most 0; rows of up to `MAX_TERMS` over all shards.
      all_shards: adds up what other devices hold of the rows.
    """
    high, low = (part.reshape(z.shape[0], -1, _BLOCK).sum(axis=2) for part in _parts(_whole_blocks(z)))
    # Block sums are integers below 2^25 in their unit; two limbs each keep the sums over blocks within 32 bits.
    high, low = _as_integer(high, _HIGH_BITS), _as_integer(low, _LOW_BITS)
    limbs = [part.sum(axis=1) for part in (*_limbs(high), *_limbs(low))]
    return _from_limbs(*map(all_shards, limbs))


def running(z: Float[Array, "B C"]) -> Mass:
    """Of each column, the mass of its row up to it, itself included; at most `MAX_COLUMNS` columns."""
    high, low = (part[:, : z.shape[1]] for part in parts(_whole_blocks(z)))
    return from_sums(jnp.cumsum(high, axis=1), jnp.cumsum(low, axis=1))


def _whole_blocks(z: Float[Array, "B C"]) -> Float[Array, "B D"]:
    """z with columns of no weight up to whole blocks: what XLA computes for the odd lanes at the end of a row, by other
    instructions than the rest, may differ in the last bit of an exponential."""
    return jnp.pad(z, ((0, 0), (0, -z.shape[1] % _BLOCK)), constant_values=-jnp.inf)


def _parts(z: Float[Array, "*C"]) -> tuple[Float[Array, "*C"], Float[Array, "*C"]]:
    """exp(z) cut down to a multiple of 2^-18, and the rest cut down to a multiple of 2^-36."""
    weight = jnp.exp(z)
    high = _cut(weight, _HIGH_BITS)
    return high, _cut(weight - high, _LOW_BITS)


def _cut(value: Float[Array, "*C"], bits: int) -> Float[Array, "*C"]:
    """The largest multiple of 2^-bits that is not above the value, which is in [0, 2^(24 - bits))."""
    # On the bits: a compiler that may reorder float sums could undo a rounding made of an addition and a subtraction.
    word = jax.lax.bitcast_convert_type(value, jnp.uint32)
    num_dropped = jnp.uint32(127 + 23 - bits) - (word >> 23)
    kept = (word >> num_dropped) << num_dropped
    return jax.lax.bitcast_convert_type(jnp.where(num_dropped < 24, kept, jnp.uint32(0)), jnp.float32)


def _as_integer(part: Float[Array, "*C"], bits: int) -> Int[Array, "*C"]:
    return (part * jnp.float32(2.0**bits)).astype(jnp.int32)


def _limbs(value: Int[Array, "*C"]) -> tuple[Int[Array, "*C"], Int[Array, "*C"]]:
    """value = upper 2^12 + lower, lower in [0, 2^12)."""
    return value >> 12, value & 4095


def _from_limbs(
    high_upper: Int[Array, "*C"], high_lower: Int[Array, "*C"], low_upper: Int[Array, "*C"], low_lower: Int[Array, "*C"]
) -> Mass:
    """(high_upper 2^12 + high_lower) 2^18 + low_upper 2^12 + low_lower, carried into two words."""
    high_upper, high_lower = high_upper + (high_lower >> 12), high_lower & 4095
    low_upper, low_lower = low_upper + (low_lower >> 12), low_lower & 4095
    middle = (high_lower << 6) + low_upper
    high_upper, middle = high_upper + (middle >> 18), middle & (2**18 - 1)
    top = high_upper.astype(jnp.uint32)
    low = (top << jnp.uint32(30)) | (middle << 12).astype(jnp.uint32) | low_lower.astype(jnp.uint32)
    return Mass(top >> jnp.uint32(2), low)


def _word(digits: list[UInt[Array, "*B"]]) -> UInt[Array, "*B"]:
    return digits[0] | (digits[1] << 8) | (digits[2] << 16) | (digits[3] << 24)
