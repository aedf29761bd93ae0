import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask import Support

V = 11
LISTS = [[0], [], [10], [3, 5, 7], list(range(V)), [1, 2, 8, 9, 10]]


def with_bits(lists, vocab_size=V, width=2) -> Support:
    return Support.from_lists(lists, vocab_size, width)


@pytest.fixture(params=["compact", "packed"])
def support(request) -> Support:
    return Support.from_lists(LISTS, V) if request.param == "compact" else with_bits(LISTS)


def test_lists_go_in_and_come_out(support):
    assert support.to_lists() == LISTS
    assert support.counts.tolist() == [1, 0, 1, 3, 11, 5]
    assert (support.packed is None) == (support.width == V)


def test_cells():
    assert Support.from_lists([[3, 1], []], V).token_ids.tolist() == [[1, 3], [V, V]]
    assert Support.from_lists([[3, 1], []], V, width=3).token_ids.tolist() == [[1, 3, V], [V, V, V]]
    assert Support.from_lists([[3, 1], []], V, width=3).packed is None
    overflow = with_bits([[9, 3, 1], [4]], width=2)
    assert overflow.token_ids.tolist() == [[1, 3], [4, V]]
    assert overflow.counts.tolist() == [3, 1]
    assert overflow.packed.tolist() == [[0b00001010, 0b00000010], [0b00010000, 0]]
    assert overflow.cells().tolist() == [[True, True], [True, False]]


def test_mask(support):
    mask = np.asarray(support.to_mask())
    assert [np.flatnonzero(row).tolist() for row in mask] == LISTS


def test_contains(support):
    for token_id in range(V):
        found = support.contains(jnp.full(len(LISTS), token_id, jnp.int32))
        assert found.tolist() == [token_id in ids for ids in LISTS]
    # V marks unused cells, and 12 is a spare bit of the last byte: neither is an id.
    for outside in (-1, -8, V, 12, 10**6):
        assert not support.contains(jnp.full(len(LISTS), outside, jnp.int32)).any()


def test_leading_axes(support):
    grid = support.reshape(2, 3)
    assert grid.shape == (2, 3)
    assert grid.to_lists() == [LISTS[:3], LISTS[3:]]
    np.testing.assert_array_equal(grid.to_mask().reshape(6, V), support.to_mask())
    ids = jnp.array([[0, 1, 10], [4, 4, 4]], jnp.int32)
    assert grid.contains(ids).tolist() == [[True, False, True], [False, True, False]]
    assert grid.reshape(6).to_lists() == LISTS
    assert grid[1].to_lists() == LISTS[3:]
    assert grid[1, 0].to_lists() == LISTS[3]
    assert grid[:, 1].to_lists() == [LISTS[1], LISTS[4]]
    assert grid[:, 1:].to_lists() == [LISTS[1:3], LISTS[4:]]
    assert grid[None].shape == (1, 2, 3)
    assert grid[..., 0].to_lists() == [LISTS[0], LISTS[3]]
    assert support[jnp.array([5, 0])].to_lists() == [LISTS[5], LISTS[0]]
    assert support[np.array([True, False, False, True, False, False])].to_lists() == [LISTS[0], LISTS[3]]


def test_a_pytree(support):
    doubled = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), support)
    assert doubled.to_lists() == LISTS * 2
    assert doubled.vocab_size == V
    assert len(jax.tree.leaves(support)) == (2 if support.packed is None else 3)


def test_inside_jit(support):
    ids = jnp.array([0, 0, 0, 5, 5, 5], jnp.int32)
    run = jax.jit(lambda s: (s[1:].reshape(5, 1), s.to_mask(), s.contains(ids), s.cells()))
    part, mask, found, cells = run(support)
    assert part.to_lists() == [[ids] for ids in LISTS[1:]]
    np.testing.assert_array_equal(mask, support.to_mask())
    np.testing.assert_array_equal(found, support.contains(ids))
    np.testing.assert_array_equal(cells, support.cells())


@pytest.mark.parametrize("vocab_size", [1, 9, 257])
def test_from_logits(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(40, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < rng.random((40, 1))] = -np.inf
    logits[rng.random(logits.shape) < 0.1] = np.nan
    logits[rng.random(logits.shape) < 0.1] = np.inf
    expected = [np.flatnonzero(np.isfinite(row)).tolist() for row in logits]
    for width in {5, vocab_size}:
        made = Support.from_logits(jnp.asarray(logits), width)
        assert made.to_lists() == expected
        assert made.width == width
        assert (made.packed is None) == (width >= vocab_size)
        cells = [(ids + [vocab_size] * width)[:width] for ids in expected]
        assert made.token_ids.tolist() == cells
        if made.packed is not None:
            assert np.unpackbits(np.asarray(made.packed), axis=1).sum(axis=1).tolist() == list(map(len, expected))
    grid = Support.from_logits(jnp.asarray(logits.reshape(4, 10, vocab_size)), 5)
    assert grid.to_lists() == [expected[i : i + 10] for i in range(0, 40, 10)]


def test_no_rows():
    empty = Support.from_lists([], V)
    assert empty.shape == (0,)
    assert empty.to_lists() == []
    assert empty.to_mask().shape == (0, V)


def test_errors_name_the_row():
    with pytest.raises(ValueError, match=r"support of row 1 holds ids \[-1, 11\] outside \[0, 11\)"):
        Support.from_lists([[0], [11, -1, 3]], V)
    with pytest.raises(ValueError, match=r"support of row 2 repeats ids \[3\]"):
        Support.from_lists([[0], [], [3, 1, 3]], V)
    for width in (0, -1):
        with pytest.raises(ValueError, match=f"width must be at least 1, got {width}"):
            Support.from_logits(jnp.zeros((1, V)), width)
        with pytest.raises(ValueError, match=f"width must be at least 1, got {width}"):
            Support.from_lists([[0]], V, width)


def test_a_support_is_a_finite_sequence_of_its_rows():
    support = Support.from_lists([[1, 2], [0], []], 10)
    assert len(support) == 3
    assert [row.to_lists() for row in support] == [[1, 2], [0], []]
    assert support[-1].to_lists() == []
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 3"):
            support[index]
