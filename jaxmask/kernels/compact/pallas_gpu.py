"""Compaction on a GPU: one pass over the logits, and a second kernel that reads only the bits it made.

Cut into chunks of 4096 ids, so that four rows fill a card:

    pack     (row, chunk): the kept set of the chunk as 128 words, and its size
    expand   (row, chunk): adds up the sizes of the chunks before, and stores the chunk's ids where they belong

Nothing is communicated between programs but these outputs, so the result is the same on every run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from jaxmask import bits
from jaxmask.kernels import triton
from jaxmask.support import Support

CHUNK = 4096
WORDS = CHUNK // bits.WORD_BITS


@functools.partial(jax.jit, static_argnames=("width", "has_bits", "is_interpreted"))
def compact_support(
    processed_logits: Float[Array, "R V"], width: int, has_bits: bool, is_interpreted: bool = False
) -> Support:
    """The finite entries of each row (see `api.compact_support`)."""
    vocab_size = processed_logits.shape[1]
    words, sizes = pack(processed_logits, is_interpreted=is_interpreted)
    # Cells that no row can fill are no work for the kernel.
    num_cells = min(width, vocab_size)
    token_ids, counts = expand(words, sizes, num_cells, vocab_size, is_interpreted=is_interpreted)
    token_ids = jnp.pad(token_ids, ((0, 0), (0, width - num_cells)), constant_values=vocab_size)
    packed = bits.words_to_bytes(words, vocab_size) if has_bits else None
    return Support(token_ids, counts, packed, vocab_size)


def num_chunks(vocab_size: int) -> int:
    """Chunks of a row."""
    return -(-vocab_size // CHUNK)


def pack(logits: Float[Array, "R V"], *, is_interpreted: bool) -> tuple[UInt[Array, "R N"], Int[Array, "R K"]]:
    """The finite entries of each row as bits (see `bits.pack_words`), and how many each chunk has."""
    num_rows, vocab_size = logits.shape

    def kernel(logits_ref: Any, words_ref: Any, sizes_ref: Any) -> None:
        row, chunk = triton.program_id(0), triton.program_id(1)
        ids = chunk * CHUNK + cells()
        chunk_logits = triton.load(logits_ref.at[row, ids], mask=ids < vocab_size, other=-jnp.inf)
        lanes = jax.lax.broadcasted_iota(jnp.uint32, (WORDS, bits.WORD_BITS), 1)
        is_kept = jnp.isfinite(chunk_logits.astype(jnp.float32))
        words = jnp.where(is_kept, jnp.uint32(1) << lanes, jnp.uint32(0))
        store_words(words.sum(axis=1, dtype=jnp.uint32), words_ref, sizes_ref)

    return triton.call(
        kernel,
        bit_shapes(num_rows, vocab_size),
        logits,
        name="compact_pack",
        grid=(num_rows, num_chunks(vocab_size)),
        num_warps=4,
        is_interpreted=is_interpreted,
    )


def expand(
    words: UInt[Array, "R N"], sizes: Int[Array, "R K"], width: int, fill: int, *, is_interpreted: bool
) -> tuple[Int[Array, "R W"], Int[Array, " R"]]:
    """The first `width` set bit positions of each row, ascending, unused cells at `fill`; and how many bits are set.

    Args:
      words: from `pack`.
      sizes: set bits of each chunk of 128 words.
      width: cells of a row.
      fill: what unused cells hold.
      is_interpreted: see `triton.call`.
    """
    num_rows, num_words = words.shape
    chunks = sizes.shape[1]
    # Every program fills a part of the cells that no id claims.
    part = triton.power_of_two(-(-width // chunks))

    def kernel(words_ref: Any, sizes_ref: Any, ids_ref: Any, counts_ref: Any) -> None:
        row, chunk = triton.program_id(0), triton.program_id(1)
        places = jnp.arange(triton.power_of_two(chunks), dtype=jnp.int32)
        row_sizes = triton.load(sizes_ref.at[row, places], mask=places < chunks, other=0)
        before = jnp.where(places < chunk, row_sizes, 0).sum(dtype=jnp.int32)
        here = jnp.where(places == chunk, row_sizes, 0).sum(dtype=jnp.int32)
        count = row_sizes.sum(dtype=jnp.int32)

        slots = chunk * part + jnp.arange(part, dtype=jnp.int32)
        is_unused = (slots >= count) & (slots < width)
        triton.store(ids_ref.at[row, slots], jnp.full_like(slots, fill), mask=is_unused)

        @triton.when(chunk == 0)
        def _() -> None:
            triton.store(counts_ref.at[row], count)

        # Most chunks of a truncated row are empty.
        @triton.when((here > 0) & (before < width))
        def _() -> None:
            places = chunk * WORDS + jnp.arange(WORDS, dtype=jnp.int32)
            chunk_words = triton.load(words_ref.at[row, places], mask=places < num_words, other=jnp.uint32(0))
            set_bits = triton.population_count(chunk_words)
            starts = before + jnp.cumsum(set_bits) - set_bits
            lanes = jax.lax.broadcasted_iota(jnp.uint32, (WORDS, bits.WORD_BITS), 1)
            lower = chunk_words[:, None] & ((jnp.uint32(1) << lanes) - jnp.uint32(1))
            ranks = starts[:, None] + triton.population_count(lower)
            is_set = ((chunk_words[:, None] >> lanes) & jnp.uint32(1)) > 0
            triton.store(ids_ref.at[row, ranks], chunk * CHUNK + cells(), mask=is_set & (ranks < width))

    shapes = [jax.ShapeDtypeStruct((num_rows, width), jnp.int32), jax.ShapeDtypeStruct((num_rows,), jnp.int32)]
    return triton.call(
        kernel,
        shapes,
        words,
        sizes,
        name="compact_expand",
        grid=(num_rows, chunks),
        num_warps=4,
        is_interpreted=is_interpreted,
    )


def cells() -> Int[Array, "128 32"]:
    """Position within its chunk of each bit of the chunk's words."""
    shape = (WORDS, bits.WORD_BITS)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) * bits.WORD_BITS + jax.lax.broadcasted_iota(
        jnp.int32, shape, 1
    )


def bit_shapes(num_rows: int, vocab_size: int) -> list[jax.ShapeDtypeStruct]:
    """The outputs of kernels that end with `store_words`."""
    num_words = -(-vocab_size // bits.WORD_BITS)
    return [
        jax.ShapeDtypeStruct((num_rows, num_words), jnp.uint32),
        jax.ShapeDtypeStruct((num_rows, num_chunks(vocab_size)), jnp.int32),
    ]


def store_words(words: UInt[Array, " 128"], words_ref: Any, sizes_ref: Any) -> None:
    """Stores the bits of this program's chunk, and how many are set; bits past the vocabulary are 0."""
    row, chunk = triton.program_id(0), triton.program_id(1)
    places = chunk * WORDS + jnp.arange(WORDS, dtype=jnp.int32)
    triton.store(words_ref.at[row, places], words, mask=places < words_ref.shape[1])
    triton.store(sizes_ref.at[row, chunk], triton.population_count(words).sum(dtype=jnp.int32))
