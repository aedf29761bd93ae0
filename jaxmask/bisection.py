"""The filters on whole rows, exact and without a sort.

For rows whose kept set may be anything: no top-k, a top-k beyond the candidates, or too many ties. Top-k is found by
bisection on order-preserving keys. Top-p is bracketed with float masses, which are fast but depend on the order of
their sums, and then decided with exact ones among the few tokens of the bracket.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import candidates, filters, mass, shards
from jaxmask.mass import Mass

# Tokens of a bracket, sorted at the end of the search.
_BRACKET = 512
# Below this z no token adds a unit of mass, so no nucleus ends there.
_LOWEST_Z = -27.0


def keep(
    logits: Float[Array, "B C"],
    z: Float[Array, "B C"],
    min_p: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    part: shards.Slice | None = None,
) -> Bool[Array, "B C"]:
    """Which tokens survive min-p, then top-k, then top-p.

    Args:
      logits: edited logits, finite or -inf: they give the order.
      z: the same after `filters.temper`: they give the mass.
      min_p: in [0, 1].
      top_k: at least 1.
      top_p: in (0, 1].
      part: where these columns lie in the row; by default they are the row.
    """
    part = shards.Slice(logits.shape[1]) if part is None else part
    is_kept = filters.survives_min_p(z, min_p)
    count = part.total(is_kept.sum(axis=1, dtype=jnp.int32))
    length = filters.top_k_length(count, top_k)
    is_kept = jax.lax.cond((length < count).any(), lambda: first(logits, is_kept, length, part), lambda: is_kept)
    return jax.lax.cond((top_p < 1).any(), lambda: _nucleus(logits, z, is_kept, top_p, part), lambda: is_kept)


def first(
    logits: Float[Array, "B C"], is_token: Bool[Array, "B C"], length: Int[Array, " B"], part: shards.Slice
) -> Bool[Array, "B C"]:
    """The first `length` of the tokens in canonical order; there are that many, and at least one."""
    keys = candidates.order_keys(logits)

    def count(is_counted: Bool[Array, "B C"]) -> Int[Array, " B"]:
        return part.total((is_counted & is_token).sum(axis=1, dtype=jnp.int32))

    key = _largest_key(lambda trial: count(keys >= trial) >= length, keys.shape[0])
    return _up_to(keys, is_token, key, length - count(keys > key[:, None]), part)


def _nucleus(
    logits: Float[Array, "B C"],
    z: Float[Array, "B C"],
    is_kept: Bool[Array, "B C"],
    top_p: Float[Array, " B"],
    part: shards.Slice,
) -> Bool[Array, "B C"]:
    """The shortest prefix of the kept tokens whose share of their mass reaches top_p; all of them for top_p 1."""
    z = jnp.where(is_kept, z, -jnp.inf)
    target = mass.total(z, part.total).share(top_p)
    low, high = _bracket(z, top_p, part)
    is_above = z >= high[:, None]
    above = mass.total(jnp.where(is_above, z, -jnp.inf), part.total)
    is_between = (z >= low[:, None]) & ~is_above
    columns = candidates.between_columns(logits, is_between, _BRACKET, part)
    in_bracket = filters.prefix(part.picked(z, columns.token_ids), columns.length)
    reaches = (above[:, None] + mass.running(in_bracket)).reaches(target[:, None])
    reaches &= filters.is_prefix(in_bracket, columns.length)
    # Float masses may misplace the bracket, and ties may overflow it: then nothing is decided here.
    is_decided = ~above.reaches(target) & reaches.any(axis=1)

    def by_columns() -> Bool[Array, "B C"]:
        last = jnp.argmax(reaches, axis=1)[:, None]
        key, token_id = (
            jnp.take_along_axis(cells, last, axis=1)
            for cells in (candidates.order_keys(columns.logits), columns.token_ids)
        )
        keys = candidates.order_keys(logits)
        return is_kept & ((keys > key) | ((keys == key) & (part.token_ids() <= token_id)))

    nucleus = jax.lax.cond(
        (is_decided | (top_p == 1)).all(), by_columns, lambda: _nucleus_by_keys(logits, z, target, part)
    )
    return jnp.where((top_p < 1)[:, None], nucleus, is_kept)


def _bracket(
    z: Float[Array, "B C"], top_p: Float[Array, " B"], part: shards.Slice
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Bounds of z between which the nucleus ends, as far as float masses tell; few tokens lie in [low, high)."""
    weights = jnp.exp(z)
    target = top_p * part.total(weights.sum(axis=1))

    def is_wide(state: tuple[Array, Array, Array]) -> Bool[Array, ""]:
        step, low, high = state
        is_between = (z >= low[:, None]) & (z < high[:, None])
        # 30 halvings of 28 are below the distance of float32 numbers near the largest z.
        return (step < 30) & (part.total(is_between.sum(axis=1, dtype=jnp.int32)) > _BRACKET).any()

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, low, high = state
        middle = (low + high) / 2
        inside = part.total(jnp.where(z >= middle[:, None], weights, 0.0).sum(axis=1))
        reaches = inside >= target
        return step + 1, jnp.where(reaches, middle, low), jnp.where(reaches, high, middle)

    start = (jnp.int32(0), jnp.full_like(top_p, _LOWEST_Z), jnp.ones_like(top_p))
    _, low, high = jax.lax.while_loop(is_wide, halve, start)
    return low, high


def _nucleus_by_keys(
    logits: Float[Array, "B C"], z: Float[Array, "B C"], target: Mass, part: shards.Slice
) -> Bool[Array, "B C"]:
    """The shortest prefix of the tokens with finite z whose mass reaches the target: exact masses all the way."""
    keys = candidates.order_keys(logits)

    def total(is_counted: Bool[Array, "B C"]) -> Mass:
        return mass.total(jnp.where(is_counted, z, -jnp.inf), part.total)

    key = _largest_key(lambda trial: total(keys >= trial).reaches(target), keys.shape[0])
    above = total(keys > key[:, None])
    last_id = part.num * part.size
    first_tied = part.smallest(jnp.where(keys == key[:, None], part.token_ids(), last_id).min(axis=1))
    tied = total(part.token_ids() == first_tied[:, None])

    def halve(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state
        middle = (low + high) // 2
        reaches = (above + tied.times(middle)).reaches(target)
        return jnp.where(reaches, low, middle + 1), jnp.where(reaches, middle, high)

    ones = jnp.ones(keys.shape[0], jnp.int32)
    _, num_tied = jax.lax.fori_loop(0, 20, halve, (ones, ones * mass.MAX_TERMS))
    return _up_to(keys, jnp.isfinite(z), key, num_tied, part)


def _up_to(
    keys: UInt[Array, "B C"],
    is_token: Bool[Array, "B C"],
    key: UInt[Array, " B"],
    num_tied: Int[Array, " B"],
    part: shards.Slice,
) -> Bool[Array, "B C"]:
    """Tokens above the key, and the first `num_tied` of those at it, by id."""
    is_tied = is_token & (keys == key[:, None])
    num_left = part.before(is_tied.sum(axis=1, dtype=jnp.int32))
    rank = num_left[:, None] + jnp.cumsum(is_tied, axis=1, dtype=jnp.int32)
    return is_token & ((keys > key[:, None]) | (is_tied & (rank <= num_tied[:, None])))


def _largest_key(reaches: Callable[[UInt[Array, "B 1"]], Bool[Array, " B"]], num_rows: int) -> UInt[Array, " B"]:
    """The largest key that `reaches`, given that lower keys do whenever higher ones do, and that 0 does."""

    def set_bit(step: Array, key: UInt[Array, " B"]) -> UInt[Array, " B"]:
        trial = key | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        return jnp.where(reaches(trial[:, None]), trial, key)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(num_rows, jnp.uint32))
