"""The head of the canonical order without sorting the vocabulary.

The vocabulary is cut into chunks of 64 ids, a stride apart. The k-th largest chunk maximum is a lower bound of the
k-th largest logit (each of k chunks holds an entry at least that large), so {logit >= bound} contains the top-k: about
k tokens on real rows, in the chunks with the k largest maxima. One pass over the logits finds the maxima; the rest
looks at these chunks alone, and sorts the few candidates. Ties at the bound can make more of them than there is room
for: such rows are flagged.

Where the vocabulary is sharded, each device offers its own candidates; these few cross devices, the logits do not.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import bits, filters, mass, shards

CHUNK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """The first tokens of each row in canonical order.

    Attributes:
      token_ids: ids in canonical order; past `length` they mean nothing.
      logits: their edited logits; -inf past `length`.
      length: how many there are; 0 in rows whose candidates did not fit.
      is_whole: they are all the tokens the row has.
    """

    token_ids: Int[Array, "B C"]
    logits: Float[Array, "B C"]
    length: Int[Array, " B"]
    is_whole: Bool[Array, " B"]


def order_keys(logits: Float[Array, "*C"]) -> UInt[Array, "*C"]:
    """uint32 keys with the order of the float32 logits; -0 and 0 share one; anything not finite is 0, below all others.

    Keys are compared as integers, so subnormal logits keep their order where floats would be flushed to zero.
    """
    # On the bits: a float comparison could flush a subnormal to zero and merge it with 0.
    words = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    words = jnp.where(words == sign, jnp.uint32(0), words)
    keys = jnp.where(words >= sign, ~words, words | sign)
    return jnp.where(jnp.isfinite(logits), keys, jnp.uint32(0))


def logit_of(keys: UInt[Array, "*C"]) -> Float[Array, "*C"]:
    """The logits that have these keys; 0 for the key of what is no token."""
    sign = jnp.uint32(0x80000000)
    words = jnp.where(keys >= sign, keys ^ sign, ~keys)
    return jax.lax.bitcast_convert_type(jnp.where(keys > 0, words, jnp.uint32(0)), jnp.float32)


def num_columns(width: int, vocab_size: int, num_top: int = 0) -> int:
    """Columns worth keeping for supports of up to `width` ids and `num_top` reported ones.

    Twice as many as needed, since a bound admits a few more; no more than masses can be summed over.
    """
    return min(vocab_size, 2 * max(width, num_top) + 32, mass.MAX_COLUMNS)


def leading_columns(
    logits: Float[Array, "B C"], top_k: Int[Array, " B"], num: int, part: shards.Slice | None = None
) -> Columns:
    """The first `num` or fewer tokens of each row in canonical order.

    Args:
      logits: edited logits, any float dtype; entries that are not finite are no tokens.
      top_k: how many leading tokens each row needs, at least 1; rows that need more than there is room for get most of
        it filled.
      num: columns of the result.
      part: where the columns of `logits` lie in the row; by default they are the row.
    """
    part = shards.Slice(logits.shape[1]) if part is None else part
    room = min(num, part.size)
    if room == part.size:
        ids = jnp.broadcast_to(part.token_ids(), logits.shape)
        bound = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
        return _in_order(ids, filters.drawable(logits), bound, jnp.ones(logits.shape[0], jnp.bool_), num, part)
    chunks, bound, is_bound = _leading_chunks(logits, top_k, room)
    stride = _num_chunks(part.size)
    ids = (chunks[:, :, None] + stride * jnp.arange(CHUNK, dtype=jnp.int32)[None, None, :]).reshape(len(chunks), -1)
    in_chunks = jnp.take_along_axis(logits, jnp.minimum(ids, part.size - 1), axis=1).astype(jnp.float32)
    is_candidate = (in_chunks >= bound[:, None]) & jnp.isfinite(in_chunks) & (ids < part.size)
    positions, values, fits = gather(in_chunks, is_candidate, room)
    ids = jnp.take_along_axis(ids, positions, axis=1)
    return _in_order(part.offset() + ids, values, bound, fits & is_bound, num, part)


def between_columns(
    logits: Float[Array, "B C"], is_wanted: Bool[Array, "B C"], num: int, part: shards.Slice
) -> Columns:
    """The first `num` wanted tokens of each row in canonical order; none where a slice holds more than that."""
    ids, values, fits = gather(logits, is_wanted, min(num, part.size))
    bound = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
    return _in_order(part.offset() + ids, values, bound, fits, num, part)


def gather(
    logits: Float[Array, "B C"], is_wanted: Bool[Array, "B C"], num: int
) -> tuple[Int[Array, "B N"], Float[Array, "B N"], Bool[Array, " B"]]:
    """Positions and float32 logits of the first `num` wanted columns (0 and -inf in unused cells); whether all fit."""
    size = logits.shape[1]
    positions, counts = bits.select_ids(bits.pack_words(is_wanted), num, fill=size)
    is_used = positions < size
    positions = jnp.where(is_used, positions, 0)
    values = jnp.take_along_axis(logits, positions, axis=1).astype(jnp.float32)
    return positions, jnp.where(is_used, values, -jnp.inf), counts <= num


def _num_chunks(size: int) -> int:
    return -(-size // CHUNK)


def rank_that_fits(room: int, num_chunks: int) -> int:
    """The rank of a chunk maximum that about `room` tokens reach, and seldom more, where tokens lie at random.

    If a share r / n of chunks holds one of c such tokens, c = -n ln(1 - r / n); four deviations are left as slack.
    """
    target = max(room - 4 * math.sqrt(room), 1)
    return max(int(num_chunks * -math.expm1(-target / num_chunks)), 1)


def _leading_chunks(
    logits: Float[Array, "B C"], top_k: Int[Array, " B"], room: int
) -> tuple[Int[Array, "B K"], Float[Array, " B"], Bool[Array, " B"]]:
    """The chunks with the largest maxima, the k-th largest maximum, and whether no other chunk reaches it.

    Where k is too large for that, the bound is one that fills most of the room.
    """
    maxima = _chunk_maxima(logits)
    num_chunks = maxima.shape[1]
    most = rank_that_fits(room, num_chunks)
    num = min(most + 1, num_chunks)
    # The maximum of a chunk with NaN or +inf may say nothing of its tokens: it is looked into, and sets no bound. (A
    # clean copy of [B, V] would tell, and cost more than all the rest.)
    is_unknown = jnp.isnan(maxima) | jnp.isposinf(maxima)
    # 64 times fewer than logits, and only the leading ones are needed: `top_k` is far cheaper here than a sort.
    maxima, chunks = jax.lax.top_k(jnp.where(is_unknown, jnp.inf, maxima), num)
    # XLA would merge the slices below into the top-k, no longer know it for one, and sort all the maxima. One barrier
    # for both results would take them as a tuple, at which the compiler of jaxlib 0.10 aborts.
    maxima, chunks = jax.lax.optimization_barrier(maxima), jax.lax.optimization_barrier(chunks)
    rank = jnp.minimum(is_unknown.sum(axis=1, dtype=jnp.int32) + top_k, most)
    bound = jnp.take_along_axis(maxima, rank[:, None] - 1, axis=1)[:, 0]
    # Chunks that were left out reach at most the last maximum.
    is_bound = (bound > maxima[:, -1]) | jnp.isneginf(bound) if num < num_chunks else jnp.ones_like(is_unknown[:, 0])
    return chunks, bound, is_bound & (bound < jnp.inf)


def _chunk_maxima(logits: Float[Array, "B C"]) -> Float[Array, "B K"]:
    """The maximum of each chunk, float32; chunk c holds the columns c, c + K, c + 2 K, ...

    A chunk with a NaN gives NaN, or the maximum of its other entries: never less. `max` promises no such thing where it
    is compiled to vector instructions, which return their second operand when one is NaN.
    """
    num_chunks = _num_chunks(logits.shape[1])
    is_half = logits.dtype.itemsize == 2
    # Half-precision numbers as integers of the same order, since only these have vector instructions on a CPU.
    values = _flip(jax.lax.bitcast_convert_type(logits, jnp.int16)) if is_half else logits.astype(jnp.float32)
    lowest = jnp.iinfo(jnp.int16).min if is_half else -jnp.inf
    maxima = jnp.full((logits.shape[0], num_chunks), lowest, values.dtype)
    for start in range(0, logits.shape[1], num_chunks):
        row = values[:, start : start + num_chunks]
        row = jnp.pad(row, ((0, 0), (0, num_chunks - row.shape[1])), constant_values=lowest)
        maxima = jnp.maximum(maxima, row) if is_half else jnp.where(row > maxima, row, maxima)
    if is_half:
        maxima = jax.lax.bitcast_convert_type(_flip(maxima), logits.dtype).astype(jnp.float32)
        maxima = jnp.where(jnp.isnan(maxima) & jnp.signbit(maxima), -jnp.inf, maxima)
    return maxima


def _flip(words: Int[Array, "B C"]) -> Int[Array, "B C"]:
    """Bits of 16-bit floats to integers of the same order, and back."""
    return words ^ ((words >> 15) & jnp.int16(0x7FFF))


def _in_order(
    token_ids: Int[Array, "B C"],
    logits: Float[Array, "B C"],
    bound: Float[Array, " B"],
    fits: Bool[Array, " B"],
    num: int,
    part: shards.Slice,
) -> Columns:
    """Candidates of all slices, sorted; `bound` and `fits` speak of this slice."""
    if not part.is_whole:
        # A slice with a lower bound than its neighbours offers tokens below theirs: the order has gaps there.
        bound = part.largest(bound)
        fits = part.smallest(fits.astype(jnp.int32)) > 0
        # By keys: compared as floats, a subnormal below the bound would pass for 0.
        reaches = order_keys(logits) >= order_keys(bound[:, None])
        logits = jnp.where(reaches, logits, -jnp.inf)
        token_ids, logits = part.joined(token_ids), part.joined(logits)
    descending = ~order_keys(logits)
    _, token_ids, logits = jax.lax.sort((descending, token_ids, logits), dimension=1, num_keys=2)
    count = jnp.isfinite(logits).sum(axis=1, dtype=jnp.int32)
    logits = jnp.where(fits[:, None], logits[:, :num], -jnp.inf)
    length = jnp.where(fits, jnp.minimum(count, logits.shape[1]), 0)
    return Columns(token_ids[:, :num], logits, length, fits & jnp.isneginf(bound) & (count == length))
