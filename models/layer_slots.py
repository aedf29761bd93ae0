"""Where tokens lie among the slots of one layer of a cache, as pure functions of its keys or values.

Heads come first, so that each head's keys and its values are one matrix. Keys lie [B, K, Hd, S], values [B, K, S, Hd]:
XLA:CPU multiplies both as they lie. A token's slot is its index modulo the number of slots.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# The axis of slots.
KEYS, VALUES = 3, 2


def tokens_of_slots(counts: Int[Array, " B"], num_slots: int) -> Int[Array, "B S"]:
    """Index of the token in each slot after counts[b] tokens; negative in slots that hold none."""
    last = counts[:, None] - 1
    return last - (last - jnp.arange(num_slots, dtype=jnp.int32)[None]) % num_slots


def laid(tokens: Float[Array, "B T K Hd"], counts: Int[Array, " B"], num_slots: int, axis: int) -> Array:
    """Slots after the first counts[b] tokens of each row; what is in slots that hold none has no meaning."""
    by_head = tokens.transpose((0, 2, 3, 1) if axis == KEYS else (0, 2, 1, 3))
    if tokens.shape[1] <= num_slots:
        return _padded(by_head, num_slots - tokens.shape[1], axis)
    return _taken(by_head, jnp.maximum(tokens_of_slots(counts, num_slots), 0), axis)


def laid_again(slots: Float[Array, "B K _ _"], counts: Int[Array, " B"], num_slots: int, axis: int) -> Array:
    """What as many slots as are asked for hold of the tokens in these; tokens that are not in these leave junk."""
    return _taken(slots, jnp.maximum(tokens_of_slots(counts, num_slots), 0) % slots.shape[axis], axis)


def first_tokens(
    slots: Float[Array, "B K _ _"], counts: Int[Array, " B"], num_slots: int, axis: int, is_plain: bool
) -> Array:
    """The first counts[b] tokens of each row in as many slots as are asked for; 0 in the others.

    With `is_plain` a token's slot is its index, here and there, so that nothing has to be looked up.
    """
    if is_plain:
        kept = jax.lax.slice_in_dim(slots, 0, min(num_slots, slots.shape[axis]), axis=axis)
        kept = _padded(kept, num_slots - kept.shape[axis], axis)
    else:
        kept = laid_again(slots, counts, num_slots, axis)
    is_kept = tokens_of_slots(counts, num_slots) >= 0
    return jnp.where(is_kept[:, None, None, :] if axis == KEYS else is_kept[:, None, :, None], kept, 0)


def written(
    slots: Float[Array, "B K M N"], tokens: Float[Array, "B C K Hd"], places: Int[Array, "B C"], axis: int
) -> Float[Array, "B K M N"]:
    """The slots with a token at each place; places past the last slot are dropped."""

    def put(of_head: Float[Array, "M N"], new: Float[Array, "C Hd"], place: Int[Array, " C"]) -> Float[Array, "M N"]:
        if axis == KEYS:
            return of_head.at[:, place].set(new.T, mode="drop")
        return of_head.at[place].set(new, mode="drop")

    # Places for each head: with one for all heads, and a single row, XLA:CPU writes into copies of the slots. Mapped
    # rather than indexed, rows and heads stay where they lie on a mesh.
    of_heads = jnp.broadcast_to(places[:, None], (*slots.shape[:2], places.shape[1]))
    return jax.vmap(jax.vmap(put, in_axes=(0, 1, 0)))(slots, tokens, of_heads)


def inserted(
    slots: Float[Array, "B K _ _"], rows: Int[Array, " P"], others: Float[Array, "P K _ _"]
) -> Float[Array, "B K _ _"]:
    """The slots with others in the first slots of some rows; rows past the last are dropped."""
    return slots.at[rows, :, : others.shape[2], : others.shape[3]].set(others, mode="drop")


def roomy(slots: Float[Array, "B K _ _"], copies: int, more: int, axis: int) -> Array:
    """Each row `copies` times in a row, with more slots at the end."""
    return _padded(jnp.repeat(slots, copies, axis=0), more, axis)


def _padded(slots: Float[Array, "B K _ _"], more: int, axis: int) -> Array:
    return jnp.pad(slots, [(0, more if index == axis else 0) for index in range(4)])


def _taken(slots: Float[Array, "B K _ _"], sources: Int[Array, "B S"], axis: int) -> Array:
    index = sources[:, None, None, :] if axis == KEYS else sources[:, None, :, None]
    return jnp.take_along_axis(slots, index, axis=axis)
