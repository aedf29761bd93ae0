"""Compaction in plain JAX: the oracle of the kernels, and the path of every platform without one."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmask import bits
from jaxmask.support import Support


@functools.partial(jax.jit, static_argnames=("width", "has_bits"))
def compact_support(processed_logits: Float[Array, "R V"], width: int, has_bits: bool) -> Support:
    """The finite entries of each row, by words of 32 ids (see `jaxmask.bits`)."""
    vocab_size = processed_logits.shape[1]
    words = bits.pack_words(jnp.isfinite(processed_logits))
    token_ids, counts = bits.select_ids(words, width, fill=vocab_size)
    return Support(token_ids, counts, bits.words_to_bytes(words, vocab_size) if has_bits else None, vocab_size)
