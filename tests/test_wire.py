import itertools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxmask import Support
from jaxmask.wire import from_csr, from_padded, to_csr, to_padded

V = 11


@pytest.fixture
def unchecked():
    """Callers may pass anything; the type checks of the test run would refuse it before ours see it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 20])
def test_rows_one_after_another(width):
    """Whether a row fits its cells or lies in the bits changes nothing."""
    support = Support.from_lists([[9, 3, 1], [], [4], [0, 2, 5, 10]], V, width)
    token_ids, offsets = to_csr(support)
    assert token_ids.tolist() == [1, 3, 9, 4, 0, 2, 5, 10]
    assert offsets.tolist() == [0, 3, 3, 4, 8]
    assert (token_ids.dtype, offsets.dtype) == (np.int32, np.int64)
    assert isinstance(token_ids, np.ndarray)
    assert isinstance(offsets, np.ndarray)


def test_leading_axes_are_flattened_row_by_row():
    lists = [[0], [1, 2], [], [3], [4, 5, 6], [7]]
    for width in (1, 3):
        support = Support.from_lists(lists, V, width)
        expected = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 3, 3, 4, 7, 8]
        for shaped in (support.reshape(2, 3), support.reshape(3, 1, 2)):
            assert tuple(array.tolist() for array in to_csr(shaped)) == expected
        assert [array.tolist() for array in to_csr(support[4])] == [[4, 5, 6], [0, 3]]
        assert [array.tolist() for array in to_csr(support.reshape(2, 3)[:, :0])] == [[], [0]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("width", [1, 3])
def test_supports_fetched_to_the_host_travel_too(width):
    support = jax.device_get(Support.from_lists([[0], [1, 2], [5, 4, 10]], V, width))
    assert isinstance(support.token_ids, np.ndarray)
    assert [array.tolist() for array in to_csr(support)] == [[0, 1, 2, 4, 5, 10], [0, 1, 3, 6]]


def test_cells_of_supports_that_came_in():
    support = from_csr(np.array([9, 3, 1, 4], np.int32), np.array([0, 3, 3, 4]), V)
    assert support.token_ids.tolist() == [[1, 3, 9], [V, V, V], [4, V, V]]
    assert support.counts.tolist() == [3, 0, 1]
    assert support.packed is None
    assert support.vocab_size == V
    narrow = from_csr([9, 3, 1, 4], [0, 3, 3, 4], V, width=2)
    assert narrow.token_ids.tolist() == [[1, 3], [V, V], [4, V]]
    assert narrow.packed.tolist() == [[0b00001010, 0b010], [0, 0], [0b00010000, 0]]
    assert (narrow.token_ids.dtype, narrow.counts.dtype, narrow.packed.dtype) == (jnp.int32, jnp.int32, jnp.uint8)
    assert from_csr([4], [0, 1], V, width=3).token_ids.tolist() == [[4, V, V]]


@pytest.mark.parametrize("vocab_size", [1, 8, 9, 300])
@pytest.mark.parametrize("width", [1, 4, None])
def test_there_and_back(vocab_size, width):
    """Against masks in NumPy, on rows of every size, the whole vocabulary included."""
    rng = np.random.default_rng(vocab_size)
    mask = rng.random((60, vocab_size)) < rng.random((60, 1)) ** 4
    mask[7], mask[8] = True, False
    support = Support.from_lists([np.flatnonzero(row).tolist() for row in mask], vocab_size, width)
    token_ids, offsets = to_csr(support)
    np.testing.assert_array_equal(token_ids, np.nonzero(mask)[1])
    np.testing.assert_array_equal(offsets, np.concatenate([[0], np.cumsum(mask.sum(axis=1))]))
    shuffled = np.concatenate([rng.permutation(token_ids[start:end]) for start, end in itertools.pairwise(offsets)])
    back = from_csr(shuffled, offsets, vocab_size, width=width)
    assert jax.tree.structure(back) == jax.tree.structure(support)
    for before, after in zip(jax.tree.leaves(support), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(before, after)


def test_supports_of_a_sampler_have_the_same_rows():
    """Packed bits beside every row, also the narrow ones."""
    rng = np.random.default_rng(0)
    logits = np.where(rng.random((20, 77)) < 0.1, 0.0, -np.inf).astype(np.float32)
    support = Support.from_logits(jnp.asarray(logits.reshape(4, 5, 77)), 6)
    assert (np.asarray(support.counts) > 6).any()
    assert (np.asarray(support.counts) <= 6).any()
    rows, ids = np.nonzero(np.isfinite(logits))
    token_ids, offsets = to_csr(support)
    np.testing.assert_array_equal(token_ids, ids)
    np.testing.assert_array_equal(offsets[1:], np.bincount(rows, minlength=20).cumsum())


def test_nothing_at_all():
    token_ids, offsets = to_csr(Support.from_lists([], V))
    assert (token_ids.tolist(), offsets.tolist()) == ([], [0])
    assert (token_ids.dtype, offsets.dtype) == (np.int32, np.int64)
    for none in ([], np.zeros(0, np.int32)):
        assert from_csr(none, [0], V).shape == (0,)
        empty = from_csr(none, [0, 0, 0], V)
        assert empty.to_lists() == [[], []]
        assert empty.token_ids.tolist() == [[V], [V]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_every_integer_dtype_comes_in(dtype):
    # A vocabulary of 300 does not fit uint8.
    support = from_csr(np.array([55, 7], dtype), np.array([0, 0, 2], dtype), 300)
    assert support.to_lists() == [[], [7, 55]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("token_ids", "offsets", "message"),
    [
        ([0, 1.0], [0, 2], "token_ids must be integers, got float64."),
        (np.array([1], np.float32), [0, 1], "token_ids must be integers, got float32."),
        (np.zeros(0), [0], "token_ids must be integers, got float64."),
        ([True], [0, 1], "token_ids must be integers, got bool."),
        ([2**70], [0, 1], "token_ids must be integers, got object."),
        ([0], [0.0, 1.0], "offsets must be integers, got float64."),
        ([[0, 1]], [0, 2], "token_ids must have one axis, got shape (1, 2)."),
        ([0], 1, "offsets must have one axis, got shape ()."),
        ([0], [1, 1], "offsets must start at 0, got [1]."),
        ([0], [-1, 1], "offsets must start at 0, got [-1]."),
        ([], [], "offsets must start at 0, got []."),
        ([0, 1], [0, 2, 1, 2], "offsets must never decrease, got 2 then 1 at row 1."),
        ([0, 1], np.array([0, 2, 1, 2], np.uint64), "offsets must never decrease, got 2 then 1 at row 1."),
        ([0, 1], [0, 1], "offsets must end at the number of token_ids, 2, got 1."),
        ([0, 1], [0, 3], "offsets must end at the number of token_ids, 2, got 3."),
        ([0], [0], "offsets must end at the number of token_ids, 1, got 0."),
        ([0, 11, 2, -1, 12], [0, 1, 4, 5], "support of row 1 holds ids [-1, 11] outside [0, 11)."),
        (np.array([2**63 + 1], np.uint64), [0, 0, 1], f"support of row 1 holds ids [{2**63 + 1}] outside [0, 11)."),
        ([0, 3, 1, 3], [0, 1, 4], "support of row 1 repeats ids [3]."),
    ],
)
def test_rows_that_are_none(token_ids, offsets, message):
    with pytest.raises(ValueError) as error:
        from_csr(token_ids, offsets, V)
    assert str(error.value) == message


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0."),
        ({"vocab_size": 11.0}, "vocab_size must be an integer, got float 11.0."),
        ({"vocab_size": V, "width": 0}, "width must be at least 1, got 0."),
        ({"vocab_size": V, "width": 1.5}, "width must be an integer, got float 1.5."),
    ],
)
def test_sizes_that_are_none(settings, message):
    with pytest.raises(ValueError) as error:
        from_csr([0], [0, 1], **settings)
    assert str(error.value) == message


def test_lost_ids_do_not_travel():
    """A promise about supports that was broken must not reach a trainer as a smaller support."""
    broken = Support(jnp.array([[0, 1], [2, 3]], jnp.int32), jnp.array([2, 3], jnp.int32), None, V)
    with pytest.raises(ValueError, match=r"^support of row 1 counts 3 ids, more than its cells hold, but has 0 packed"):
        to_csr(broken)


@pytest.mark.parametrize("width", [1, 3])
def test_padded_cells(width):
    support = Support.from_lists([[9, 3, 1], [], [4], [0, 2]], V, width).reshape(2, 2)
    cells, counts = to_padded(support)
    assert cells.tolist() == [[[1, 3, 9], [-1, -1, -1]], [[4, -1, -1], [0, 2, -1]]]
    assert counts.tolist() == [[3, 0], [1, 2]]
    assert (cells.dtype, counts.dtype) == (np.int32, np.int32)
    zeros, _ = to_padded(support, fill=0, width=4)
    assert zeros.tolist() == [[[1, 3, 9, 0], [0, 0, 0, 0]], [[4, 0, 0, 0], [0, 2, 0, 0]]]
    # NeMo-RL's zeros need the counts, SkyRL's -1 do not.
    for back in (from_padded(cells, V, width=width), from_padded(zeros, V, counts=counts, width=width)):
        assert back.to_lists() == [[[1, 3, 9], []], [[4], [0, 2]]]
        assert back.token_ids.shape == (2, 2, width)


def test_padded_cells_of_nothing():
    cells, counts = to_padded(Support.from_lists([], V))
    assert (cells.shape, counts.shape) == ((0, 1), (0,))
    assert from_padded(cells, V).shape == (0,)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("token_ids", "counts", "message"),
    [
        ([[0.5]], None, "token_ids must be integers with a last axis of cells, got float64 (1, 1)."),
        (3, None, "token_ids must be integers with a last axis of cells, got int64 ()."),
        ([[1, 2], [-1, 3]], None, "support of row 1 has ids behind padding: [-1, 3]."),
        ([[1, 2], [3, 4]], [2], "counts must be integers of shape (2,), got int64 of (1,)."),
        ([[1, 2], [3, 4]], [2, 1.5], "counts must be integers of shape (2,), got float64 of (2,)."),
        ([[1, 2], [3, 4]], [2, 3], "count of row 1 must be in [0, 2], got 3."),
        ([[1, 2], [3, 4]], [-1, 2], "count of row 0 must be in [0, 2], got -1."),
        ([[1, 2], [3, 3]], None, "support of row 1 repeats ids [3]."),
        ([[1, 2], [3, 11]], None, "support of row 1 holds ids [11] outside [0, 11)."),
        ([[1, 2], [3, -1]], [2, 2], "support of row 1 holds ids [-1] outside [0, 11)."),
    ],
)
def test_cells_that_are_none(token_ids, counts, message):
    with pytest.raises(ValueError) as error:
        from_padded(token_ids, V, counts=counts)
    assert str(error.value) == message


def test_a_support_that_does_not_fit_is_never_cut():
    with pytest.raises(ValueError, match=r"^support of row 1 holds 3 ids, more than width=2\.$"):
        to_padded(Support.from_lists([[1], [2, 3, 4]], V), width=2)
