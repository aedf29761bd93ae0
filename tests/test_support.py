import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxmask import Support

V = 11
LISTS = [[0], [], [10], [3, 5, 7], list(range(V)), [1, 2, 8, 9, 10]]


def with_bits(lists, vocab_size=V, width=2) -> Support:
    return Support.from_lists(lists, vocab_size, width)


@pytest.fixture
def unchecked():
    """Callers may pass anything; the type checks of the test run would refuse it before ours see it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 1.5], "each id of row 1 must be an integer, got float 1.5."),
        ([2.0], "each id of row 1 must be an integer, got float 2.0."),
        ([1, True], "each id of row 1 must be an integer, got bool True."),
        (["3"], "each id of row 1 must be an integer, got str '3'."),
        ([None], "each id of row 1 must be an integer, got NoneType None."),
        ([[1, 2]], "each id of row 1 must be an integer, got list [1, 2]."),
        (np.array([1.0, 1.5]), "each id of row 1 must be an integer, got float 1.0."),
        (np.array([True]), "each id of row 1 must be an integer, got bool True."),
        (5, "support of row 1 must be a list of ids, got 5."),
        ([2**70, 1], f"support of row 1 holds ids [{2**70}] outside [0, 11)."),
    ],
)
def test_only_integers_are_ids(row, message):
    with pytest.raises(ValueError) as error:
        Support.from_lists([[0], row], V)
    assert str(error.value) == message


@pytest.mark.usefixtures("unchecked")
def test_integers_of_every_kind_are_ids():
    rows = [[np.int32(3), np.uint8(1)], np.array([9, 4], np.uint16), jnp.array([7], jnp.int32), range(2, 4)]
    assert Support.from_lists(rows, V).to_lists() == [[1, 3], [4, 9], [7], [2, 3]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("vocab_size", [0, -1])
def test_a_vocabulary_has_an_id(vocab_size):
    with pytest.raises(ValueError, match=rf"^vocab_size must be at least 1, got {vocab_size}\.$"):
        Support.from_lists([[]], vocab_size)
    with pytest.raises(ValueError, match=r"^vocab_size must be an integer, got float 5\.5\.$"):
        Support.from_lists([[]], 5.5)


def test_lost_ids_are_no_list():
    broken = Support(jnp.array([[0, 1], [2, 3]], jnp.int32), jnp.array([2, 3], jnp.int32), None, V)
    with pytest.raises(ValueError, match=r"^support of row 1 counts 3 ids, more than its cells hold, but has 0 packed"):
        broken.to_lists()


def test_joined_supports_have_the_widest_cells():
    narrow = with_bits([[9, 3, 1], [4]], width=2)
    wide = Support.from_lists([[10, 0, 5, 2]], V)
    assert narrow.packed is not None
    assert wide.packed is None
    for parts, order in (([narrow, wide], [0, 1, 2]), ([wide, narrow], [2, 0, 1])):
        joined = Support.concatenate(parts)
        # [1, 3] of the narrow row was cut; in four cells all three ids must show.
        cells = [[1, 3, 9, V], [4, V, V, V], [0, 2, 5, 10]]
        packed = [[0b00001010, 0b010], [0b00010000, 0], [0b00100101, 0b100]]
        assert joined.token_ids.tolist() == [cells[i] for i in order]
        assert joined.counts.tolist() == [[3, 1, 4][i] for i in order]
        assert joined.packed.tolist() == [packed[i] for i in order]
        assert joined.vocab_size == V
        assert (joined.token_ids.dtype, joined.counts.dtype, joined.packed.dtype) == (jnp.int32, jnp.int32, jnp.uint8)


def test_joined_supports_without_bits_have_none():
    joined = Support.concatenate([Support.from_lists([[2]], V), Support.from_lists([[0, 1, 10], []], V)])
    assert joined.packed is None
    assert joined.token_ids.tolist() == [[2, V, V], [0, 1, 10], [V, V, V]]
    assert joined.counts.tolist() == [1, 3, 0]


def random_grid(rng, shape, vocab_size, width) -> Support:
    """Rows of every size, some beyond the width."""
    sizes = rng.integers(0, min(vocab_size, 2 * width) + 1, int(np.prod(shape)))
    lists = [rng.choice(vocab_size, size, replace=False).tolist() for size in sizes]
    return Support.from_lists(lists, vocab_size, width).reshape(*shape)


@pytest.mark.parametrize(
    ("vocab_size", "axis", "is_jitted"),
    [(1, 0, True), (9, 2, True), (35, 0, False), (35, -1, True), (64, -3, True), (64, 1, True), (257, -2, False)],
)
def test_joining_is_joining_of_masks(vocab_size, axis, is_jitted):
    """Against NumPy: masks joined, then cells and bits made from the joined masks."""
    rng = np.random.default_rng([vocab_size, axis % 3])
    shape = [2, 3, 2]
    parts = []
    for size, width in ((1, 1), (3, 5), (2, 2), (0, 3), (1, 9)):
        shape[axis] = size
        parts.append(random_grid(rng, tuple(shape), vocab_size, width))
    join = jax.jit(Support.concatenate, static_argnums=1) if is_jitted else Support.concatenate
    joined = join(parts, axis)
    masks = [np.asarray(part.to_mask()) for part in parts]
    expected = np.concatenate(masks, axis=axis % 3)
    np.testing.assert_array_equal(joined.to_mask(), expected)
    np.testing.assert_array_equal(joined.counts, expected.sum(axis=-1))
    assert joined.width == 9
    assert (joined.packed is not None) == any(part.packed is not None for part in parts)
    if joined.packed is not None:
        np.testing.assert_array_equal(joined.packed, np.packbits(expected, axis=-1, bitorder="little"))
    lowest = [(np.flatnonzero(row).tolist() + [vocab_size] * 9)[:9] for row in expected.reshape(-1, vocab_size)]
    np.testing.assert_array_equal(np.asarray(joined.token_ids).reshape(-1, 9), lowest)


def test_the_random_grids_overflow():
    """The test above means something: narrow rows overflow, and some of them fit the joined width."""
    grid = random_grid(np.random.default_rng([35, 0]), (1, 3, 2), 35, 5)
    counts = np.asarray(grid.counts)
    assert ((counts > 5) & (counts <= 9)).any()


def test_one_part_joined_is_itself(support):
    joined = Support.concatenate((support,))
    assert jax.tree.structure(joined) == jax.tree.structure(support)
    for before, after in zip(jax.tree.leaves(support), jax.tree.leaves(joined), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.usefixtures("unchecked")
def test_supports_on_the_host_join_those_on_the_device():
    on_host = jax.device_get(with_bits([[9, 3, 1], [4]], width=2))
    assert isinstance(on_host.token_ids, np.ndarray)
    joined = Support.concatenate([on_host, Support.from_lists([[10, 0, 5]], V)])
    assert joined.to_lists() == [[1, 3, 9], [4], [0, 5, 10]]
    assert joined.token_ids.tolist() == [[1, 3, 9], [4, V, V], [0, 5, 10]]


@pytest.mark.parametrize(
    ("parts", "axis", "message"),
    [
        ([], 0, "supports must hold at least one Support, got none."),
        ([(2, 3), (2, 3)], 2, "axis must be one of the 2 leading axes of (2, 3), got 2."),
        ([(2, 3), (2, 3)], -3, "axis must be one of the 2 leading axes of (2, 3), got -3."),
        ([()], 0, "axis must be one of the 0 leading axes of (), got 0."),
        ([(2, 3), (2, 3), (2, 4)], 0, "leading axes must agree but for axis 0, got (2, 3), but (2, 4) in part 2."),
        ([(2, 3), (1, 3)], -1, "leading axes must agree but for axis 1, got (2, 3), but (1, 3) in part 1."),
        ([(2, 3), (2,)], 1, "leading axes must agree but for axis 1, got (2, 3), but (2,) in part 1."),
        ([(2,), (2, 2)], 0, "leading axes must agree but for axis 0, got (2,), but (2, 2) in part 1."),
    ],
)
def test_supports_that_do_not_fit(parts, axis, message):
    supports = [Support.from_lists([[0]] * int(np.prod(shape)), V).reshape(*shape) for shape in parts]
    with pytest.raises(ValueError) as error:
        Support.concatenate(supports, axis)
    assert str(error.value) == message


@pytest.mark.usefixtures("unchecked")
def test_other_vocabularies_and_axes_do_not_fit():
    with pytest.raises(ValueError, match=r"^vocab_size must be the same, got 11, but 12 in part 1\.$"):
        Support.concatenate([Support.from_lists([[0]], V), Support.from_lists([[0]], V + 1)])
    with pytest.raises(ValueError, match=r"^axis must be an integer, got float 0\.0\.$"):
        Support.concatenate([Support.from_lists([[0]], V)], 0.0)


@pytest.mark.usefixtures("unchecked")
def test_split_cuts_where_the_lengths_say(support):
    pieces = support.split([1, 0, 3, np.int64(2), 0])
    assert [piece.to_lists() for piece in pieces] == [LISTS[:1], [], LISTS[1:4], LISTS[4:], []]
    assert [piece.shape for piece in pieces] == [(1,), (0,), (3,), (2,), (0,)]
    joined = Support.concatenate(pieces)
    for before, after in zip(jax.tree.leaves(support), jax.tree.leaves(joined), strict=True):
        np.testing.assert_array_equal(before, after)
    assert [piece.to_lists() for piece in support.reshape(2, 3).split([1, 1])] == [[LISTS[:3]], [LISTS[3:]]]
    assert support[:0].split([]) == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 4], "lengths must be at least 0 and sum to 6, got [1, 4] with sum 5."),
        ([3, 4], "lengths must be at least 0 and sum to 6, got [3, 4] with sum 7."),
        ([7, -1], "lengths must be at least 0 and sum to 6, got [7, -1] with sum 6."),
        ([], "lengths must be at least 0 and sum to 6, got [] with sum 0."),
        ([3.0, 3.0], "lengths must contain only integers, got [3.0, 3.0]."),
        (6, "lengths must contain only integers, got 6."),
    ],
)
def test_lengths_that_do_not_split(support, lengths, message):
    with pytest.raises(ValueError) as error:
        support.split(lengths)
    assert str(error.value) == message


def test_a_single_support_has_nothing_to_split():
    with pytest.raises(ValueError, match=r"^split needs a leading axis, got a single support\.$"):
        Support.from_lists([[1]], V)[0].split([1])
