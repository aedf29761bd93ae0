import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask import bits


def kept(num_rows, vocab_size, seed=0):
    """Rows of every density: empty, one id, sparse, dense, full."""
    rng = np.random.default_rng([vocab_size, seed])
    share = rng.choice([0, 0.02, 0.5, 0.98, 1], num_rows)[:, None]
    keep = rng.random((num_rows, vocab_size)) < share
    keep[: min(num_rows, vocab_size)] |= np.eye(vocab_size, dtype=bool)[:num_rows]
    return keep


VOCABULARIES = [1, 8, 31, 33, 257]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_words_bytes_and_ids_of_a_kept_set(vocab_size):
    keep = kept(300, vocab_size)
    words = bits.pack_words(jnp.asarray(keep))
    packed = np.packbits(keep, axis=1, bitorder="little")
    np.testing.assert_array_equal(bits.words_to_bytes(words, vocab_size), packed)
    np.testing.assert_array_equal(bits.unpack_bytes(jnp.asarray(packed), vocab_size), keep)
    for width in {5, vocab_size}:
        ids, counts = bits.select_ids(words, width, fill=-7)
        np.testing.assert_array_equal(counts, keep.sum(axis=1))
        expected = [(np.flatnonzero(row).tolist() + [-7] * width)[:width] for row in keep]
        np.testing.assert_array_equal(ids, np.array(expected).reshape(300, width))
        whole = keep & (np.cumsum(keep, axis=1) <= width)
        cells = np.where(np.asarray(ids) == -7, vocab_size, ids).astype(np.int32)
        np.testing.assert_array_equal(
            bits.pack_ids(jnp.asarray(cells), vocab_size), np.packbits(whole, axis=1, bitorder="little")
        )


def test_bit_order():
    """Bit j of byte i is id 8 i + j; vLLM's vectors: 0b00101000 holds ids 3 and 5, 0b10000000 id 7."""
    packed = jnp.array([[0b00101000], [0b10000000]], jnp.uint8)
    assert [np.flatnonzero(row).tolist() for row in bits.unpack_bytes(packed, 8)] == [[3, 5], [7]]
    assert bits.pack_ids(jnp.array([[3, 5], [7, 8]], jnp.int32), 8).tolist() == [[0b00101000], [0b10000000]]
    assert bits.pack_words(jnp.asarray(np.arange(40) == 33)[None]).tolist() == [[0, 2]]


def test_every_bit_of_a_word_is_selected():
    """All pairs of positions in one word, and the word of all ones."""
    pairs = [(i, j) for i in range(32) for j in range(i + 1, 32)]
    words = jnp.asarray(np.array([[1 << i | 1 << j] for i, j in pairs] + [[2**32 - 1]], np.uint32))
    ids, counts = bits.select_ids(words, 32, fill=99)
    assert ids[:-1, :2].tolist() == [list(pair) for pair in pairs]
    assert (np.asarray(ids)[:-1, 2:] == 99).all()
    assert ids[-1].tolist() == list(range(32))
    assert counts.tolist() == [2] * len(pairs) + [32]


def test_padding_that_shares_its_byte_with_ids_sets_no_bit():
    assert bits.pack_ids(jnp.array([[0, 4, 5, 5]], jnp.int32), 5).tolist() == [[0b00010001]]


def test_unpacking_keeps_leading_axes():
    packed = jnp.array([[[1], [2]], [[4], [255]]], jnp.uint8)
    mask = np.asarray(bits.unpack_bytes(packed, 5))
    assert [np.flatnonzero(row).tolist() for row in mask.reshape(4, 5)] == [[0], [1], [2], [0, 1, 2, 3, 4]]
