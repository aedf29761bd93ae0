"""The head of the canonical order without sorting the vocabulary.

The vocabulary is cut into chunks of 64 ids. The k-th largest chunk maximum is a lower bound of the k-th largest logit
(each of k chunks holds an entry at least that large), so {logit >= bound} contains the top-k: about k tokens on real
rows. Only these few are sorted. Ties at the bound can make more of them than there are columns: such rows are flagged.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import bits, filters

CHUNK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """The first tokens of each row in canonical order.

    Attributes:
      token_ids: ids in canonical order; the order of columns without a finite logit means nothing.
      logits: their edited logits; -inf where a row has fewer tokens.
      is_complete: the columns hold at least the row's first top_k tokens.
    """

    token_ids: Int[Array, "B C"]
    logits: Float[Array, "B C"]
    is_complete: Bool[Array, " B"]


def order_keys(logits: Float[Array, "B C"]) -> UInt[Array, "B C"]:
    """uint32 keys with the order of the float32 logits; -0 and 0 share one; anything not finite is 0, below all others.

    Keys are compared as integers, so subnormal logits keep their order where floats would be flushed to zero.
    """
    # On the bits: a float comparison could flush a subnormal to zero and merge it with 0.
    words = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    words = jnp.where(words == sign, jnp.uint32(0), words)
    keys = jnp.where(words >= sign, ~words, words | sign)
    return jnp.where(jnp.isfinite(logits), keys, jnp.uint32(0))


def num_columns(width: int, vocab_size: int) -> int:
    """Columns worth keeping for supports of up to `width` ids: twice as many, since a bound admits a few more."""
    return min(vocab_size, 2 * width + 32)


def leading_columns(logits: Float[Array, "B V"], top_k: Int[Array, " B"], num: int) -> Columns:
    """The first `num` or fewer tokens of each row in canonical order.

    Args:
      logits: edited logits, any float dtype; entries that are not finite are no tokens.
      top_k: how many leading tokens each row needs, at least 1.
      num: columns, C, at most V.
    """
    vocab_size = logits.shape[1]
    if num == vocab_size:
        ids = jnp.broadcast_to(jnp.arange(vocab_size, dtype=jnp.int32)[None, :], logits.shape)
        return _in_order(ids, filters.drawable(logits), jnp.ones(logits.shape[0], jnp.bool_))
    bound, has_bound = _lower_bound(logits, top_k, num)
    # Each of these reads `logits` for itself: a cleaned copy of [B, V] that they share would cost more than they do.
    is_candidate = (logits.astype(jnp.float32) >= bound[:, None]) & jnp.isfinite(logits)
    words = bits.pack_words(is_candidate)
    ids, counts = bits.select_ids(words, num, fill=vocab_size)
    is_padding = ids == vocab_size
    values = jnp.take_along_axis(logits, jnp.where(is_padding, 0, ids), axis=1)
    values = jnp.where(is_padding, -jnp.inf, values.astype(jnp.float32))
    return _in_order(ids, values, has_bound & (counts <= num))


def _lower_bound(
    logits: Float[Array, "B V"], top_k: Int[Array, " B"], num: int
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """The k-th largest chunk maximum, and whether it is among the `num` largest."""
    num_chunks = -(-logits.shape[1] // CHUNK)
    padding = num_chunks * CHUNK - logits.shape[1]
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    # A chunk that holds NaN or +inf counts as empty: that only lowers the bound, and spares a clean copy of [B, V].
    maxima = filters.drawable(padded.reshape(-1, num_chunks, CHUNK).max(axis=2))
    # 64 times fewer than logits, and only the leading ones are needed: `top_k` is far cheaper here than a sort.
    maxima, _ = jax.lax.top_k(maxima, min(num, num_chunks))
    rank = jnp.minimum(top_k, maxima.shape[1]) - 1
    return jnp.take_along_axis(maxima, rank[:, None], axis=1)[:, 0], top_k <= maxima.shape[1]


def _in_order(token_ids: Int[Array, "B C"], logits: Float[Array, "B C"], is_complete: Bool[Array, " B"]) -> Columns:
    descending = ~order_keys(logits)
    _, ids, values = jax.lax.sort((descending, token_ids, logits), dimension=1, num_keys=2)
    return Columns(ids, values, is_complete)
