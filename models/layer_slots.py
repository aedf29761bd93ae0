"""Where tokens lie among the slots of one layer of a cache, as pure functions of its arrays [B, S, K, Hd].

A token's slot is its index modulo the number of slots.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def tokens_of_slots(counts: Int[Array, " B"], num_slots: int) -> Int[Array, "B S"]:
    """Index of the token in each slot after counts[b] tokens; negative in slots that hold none."""
    last = counts[:, None] - 1
    return last - (last - jnp.arange(num_slots, dtype=jnp.int32)[None]) % num_slots


def laid(tokens: Float[Array, "B T K Hd"], counts: Int[Array, " B"], num_slots: int) -> Float[Array, "B S K Hd"]:
    """Slots after the first counts[b] tokens of each row; what is in slots that hold none has no meaning."""
    if tokens.shape[1] <= num_slots:
        return jnp.pad(tokens, ((0, 0), (0, num_slots - tokens.shape[1]), (0, 0), (0, 0)))
    return _taken(tokens, jnp.maximum(tokens_of_slots(counts, num_slots), 0))


def laid_again(slots: Float[Array, "B _ K Hd"], counts: Int[Array, " B"], num_slots: int) -> Float[Array, "B S K Hd"]:
    """What as many slots as are asked for hold of the tokens in these; tokens that neither kept leave junk."""
    return _taken(slots, jnp.maximum(tokens_of_slots(counts, num_slots), 0) % slots.shape[1])


def written(
    slots: Float[Array, "B S K Hd"], tokens: Float[Array, "B C K Hd"], places: Int[Array, "B C"]
) -> Float[Array, "B S K Hd"]:
    """The slots with a token at each place; places past the last slot are dropped."""
    return jax.vmap(lambda row, index, new: row.at[index].set(new, mode="drop"))(slots, places, tokens)


def inserted(
    slots: Float[Array, "B S K Hd"], rows: Int[Array, " P"], others: Float[Array, "P _ K Hd"]
) -> Float[Array, "B S K Hd"]:
    """The slots with others in the first slots of some rows; rows past the last are dropped."""
    return slots.at[rows, : others.shape[1]].set(others, mode="drop")


def roomy(slots: Float[Array, "B S K Hd"], copies: int, more: int) -> Float[Array, "R _ K Hd"]:
    """Each row `copies` times in a row, with more slots at the end."""
    return jnp.pad(jnp.repeat(slots, copies, axis=0), ((0, 0), (0, more), (0, 0), (0, 0)))


def _taken(slots: Float[Array, "B _ K Hd"], sources: Int[Array, "B S"]) -> Float[Array, "B S K Hd"]:
    return jnp.take_along_axis(slots, sources[:, :, None, None], axis=1)
