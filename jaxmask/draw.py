"""The random draw: Gumbel noise that depends on (request seed, position, token id) and on nothing else.

So a request's tokens do not change with its neighbours, its row, the compact width or the sharding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

# Threefry-2x32-20: rotations of the eight rounds, and the parity constant of its key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry_2x32(
    key: tuple[UInt[Array, "*#B"], UInt[Array, "*#B"]], counter: tuple[UInt[Array, "*#B"], UInt[Array, "*#B"]]
) -> tuple[UInt[Array, "*B"], UInt[Array, "*B"]]:
    """Two random words for each (key, counter), by Threefry-2x32 with 20 rounds.

    Written out because it must run inside kernels and on single columns, where `jax.random` cannot.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.2.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))
            y = x ^ y
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def gumbel(seeds: UInt[Array, "B 2"], positions: Int[Array, " B"], token_ids: Int[Array, "B C"]) -> Float[Array, "B C"]:
    """Standard Gumbel noise of each (seed, position, token id), float32, always finite.

    g = -ln(-ln(1 - u)), u in (0, 1). The form with 1 - u keeps full precision where u is small, which is where the
    winners of an argmax come from: the largest noise is 22.9, so probabilities down to 2^-33 are drawn.

    Args:
      seeds: low and high word of each row's seed.
      positions: output position of each row.
      token_ids: columns to draw for.
    """
    return noise((seeds[:, :1], seeds[:, 1:]), positions[:, None], token_ids)


def noise(
    seed: tuple[UInt[Array, "*#C"], UInt[Array, "*#C"]], position: Int[Array, "*#C"], token_ids: Int[Array, "*#C"]
) -> Float[Array, "*#C"]:
    """`gumbel`, elementwise."""
    word, _ = threefry_2x32(seed, (position.astype(jnp.uint32), token_ids.astype(jnp.uint32)))
    uniform = (word.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    # float32 rounds words near 2^32 up to u = 1, where the noise would be -inf.
    uniform = jnp.minimum(uniform, jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))
