import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import KVCache
from models.config import DecoderConfig

CONFIG = DecoderConfig(64, 2, 16, 4, 2, 4, 24, 1e4, None, 1e-6, True)
# Layer 0 sees 3 tokens, layer 1 all.
WINDOWED = dataclasses.replace(CONFIG, sliding_window=3, full_layers=(1,))


def make_cache(lengths, capacity=3, config=CONFIG, chunk_size=1):
    """Slot s of row b holds 10 b + s in every cell; values are negative."""
    empty = KVCache.empty(len(lengths), capacity, config, jnp.float32, chunk_size)

    def cells(slots):
        rows = 10.0 * np.arange(slots.shape[0])[:, None] + np.arange(slots.shape[3])
        return jnp.asarray(np.broadcast_to(rows[:, None, None], slots.shape), jnp.float32)

    keys = tuple(map(cells, empty.keys))
    values = tuple(-leaf.swapaxes(2, 3) for leaf in keys)
    return dataclasses.replace(empty, keys=keys, values=values, lengths=jnp.asarray(lengths, jnp.int32))


def tokens(first, num_rows, num_tokens):
    """Token c of each row is first + c in every cell."""
    values = first + np.arange(num_tokens, dtype=np.float32)
    return jnp.asarray(np.broadcast_to(values[None, :, None, None], (num_rows, num_tokens, 2, 4)))


def test_repeat_keeps_one_copy_and_gives_each_row_room_of_its_own():
    cache = make_cache([1, 2]).repeat(3, capacity=5)
    assert cache.prompt.keys[1][:, 0, 0].tolist() == [[0, 1, 2], [10, 11, 12]]
    assert cache.prompt.values[0][:, 1, 1, 3].tolist() == [-1, -11]
    assert cache.keys[0].shape == (6, 2, 4, 5)
    assert cache.lengths.tolist() == cache.starts.tolist() == [1, 1, 1, 2, 2, 2]
    assert cache.prompt_positions(1).tolist() == [[0, -2, -1]] * 3 + [[0, 1, -1]] * 3
    assert (cache.positions(1, cache.lengths) < 0).all()


def test_in_fixed_order_repeat_copies_so_that_slots_follow_positions():
    cache = make_cache([1, 2], config=dataclasses.replace(CONFIG, fixed_order=True)).repeat(3, capacity=2)
    assert cache.prompt is None
    assert cache.keys[1][:, 0, 0].tolist() == [[0, 1, 2, 0, 0]] * 3 + [[10, 11, 12, 0, 0]] * 3
    assert (cache.capacity, cache.lengths.tolist()) == (5, [1, 1, 1, 2, 2, 2])


@pytest.mark.parametrize(("name", "value"), [("group_size", 0), ("group_size", -1), ("capacity", 0)])
def test_repeat_refuses_less_than_one(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got {value}"):
        make_cache([1]).repeat(**{"group_size": 2, "capacity": 2} | {name: value})


def test_a_cache_is_repeated_once():
    with pytest.raises(ValueError, match="share a prompt already"):
        make_cache([1]).repeat(2, capacity=1).repeat(2, capacity=1)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_write_lands_at_each_rows_own_length_and_a_full_row_drops_it(transform):
    before = make_cache([0, 3, 2])
    token, one = jnp.full((3, 1, 2, 4), 99.0), jnp.ones(3, jnp.int32)
    after = transform(lambda cache: cache.write(1, token, -token, one).advance(one))(before)
    assert after.keys[1][:, 0, 0].tolist() == [[99, 1, 2], [10, 11, 12], [20, 21, 99]]
    assert after.values[1][:, 1, :, 3].tolist() == [[-99, -1, -2], [-10, -11, -12], [-20, -21, -99]]
    assert after.lengths.tolist() == [1, 3, 3]
    assert after.is_full.tolist() == [False, True, True]
    np.testing.assert_array_equal(after.keys[0], before.keys[0])
    np.testing.assert_array_equal(after.values[0], before.values[0])


def test_a_chunk_is_cut_at_its_count_and_at_the_capacity():
    counts = jnp.array([2, 0, 3], jnp.int32)
    after = make_cache([0, 1, 2], capacity=4).write(0, tokens(50, 3, 3), tokens(50, 3, 3), counts).advance(counts)
    assert after.keys[0][:, 0, 0].tolist() == [[50, 51, 2, 3], [10, 11, 12, 13], [20, 21, 50, 51]]
    assert after.lengths.tolist() == [2, 1, 4]


def test_shared_rows_count_their_own_tokens_from_where_the_prompt_ends():
    cache = make_cache([1, 3]).repeat(2, capacity=2)
    ones = jnp.ones(4, jnp.int32)
    for _ in range(3):  # one more than fits
        cache = cache.write(0, tokens(7, 4, 1), tokens(7, 4, 1), ones).advance(ones)
    assert cache.lengths.tolist() == [3, 3, 5, 5]
    assert cache.positions(0, cache.lengths).tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_a_window_keeps_the_last_tokens_alone():
    """As in the module's docstring: after 5 tokens in 3 slots they hold tokens 3, 4, 2."""
    cache = make_cache([0, 0], capacity=8, config=WINDOWED)
    assert [leaf.shape[3] for leaf in cache.keys] == [3, 8]
    ones = jnp.array([1, 0], jnp.int32)
    for step in range(5):
        new = tokens(100 + step, 2, 1)
        cache = cache.write(0, new, new, ones).write(1, new, new, ones).advance(ones)
    assert cache.keys[0][:, 0, 0].tolist() == [[103, 104, 102], [10, 11, 12]]
    assert cache.positions(0, cache.lengths).tolist() == [[3, 4, 2], [-1, -1, -1]]
    assert cache.positions(1, cache.lengths)[0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_filling_a_window_takes_each_rows_last_tokens():
    cache = KVCache.empty(3, 8, WINDOWED, jnp.float32)
    lengths = jnp.array([5, 2, 0], jnp.int32)
    filled = cache.fill(0, tokens(0, 3, 6), tokens(0, 3, 6), lengths)
    assert filled.keys[0][0, 0, 0].tolist() == [3, 4, 2]
    assert filled.keys[0][1, 0, 0, :2].tolist() == [0, 1]


def test_a_window_has_room_for_a_chunk():
    """The first token of a chunk still finds what it sees after the last one is written."""
    cache = KVCache.empty(1, 20, WINDOWED, jnp.float32, chunk_size=4)
    assert cache.keys[0].shape[3] == 3 + 4 - 1
    counts = jnp.array([4], jnp.int32)
    for first in (0, 4):
        cache = cache.write(0, tokens(first, 1, 4), tokens(first, 1, 4), counts).advance(counts)
    positions = cache.positions(0, cache.lengths)[0].tolist()
    assert sorted(positions) == [2, 3, 4, 5, 6, 7]
    assert cache.keys[0][0, 0, 0].tolist() == positions


def test_rewinding_stops_at_the_rows_own_tokens():
    ones = jnp.ones(4, jnp.int32)
    cache = make_cache([1, 3]).repeat(2, capacity=3)
    for _ in range(2):
        cache = cache.write(1, tokens(7, 4, 1), tokens(7, 4, 1), ones).advance(ones)
    back = cache.rewind(jnp.array([0, 1, 5, -1], jnp.int32))
    assert back.lengths.tolist() == [3, 2, 3, 5]
    assert back.positions(1, back.lengths).tolist() == [[1, 2, -1], [1, -1, -1], [-1, -1, -1], [3, 4, -1]]


def test_a_window_has_what_is_seen_after_a_whole_chunk_is_forgotten():
    """Six slots for a window of 3 and chunks of 4: tokens 8 to 11 were read and forgotten, 8 comes again."""
    cache = KVCache.empty(1, 20, WINDOWED, jnp.float32, chunk_size=4)
    counts, one = jnp.array([4], jnp.int32), jnp.array([1], jnp.int32)
    for first in (0, 4, 8):
        cache = cache.write(0, tokens(first, 1, 4), tokens(first, 1, 4), counts).advance(counts)
    cache = cache.rewind(counts).write(0, tokens(8, 1, 1), tokens(8, 1, 1), one).advance(one)
    positions = np.asarray(cache.positions(0, cache.lengths)[0])
    is_seen = (positions > 8 - 3) & (positions <= 8)
    assert sorted(positions[is_seen].tolist()) == [6, 7, 8]
    assert cache.keys[0][0, 0, 0, is_seen].tolist() == positions[is_seen].tolist()


@pytest.mark.parametrize("chunk_size", [1, 4, 6])
def test_inserted_rows_are_found_where_a_window_expects_them(chunk_size):
    """Windows of 3 and 6 slots into one of 4, and of 8, which is the whole capacity."""
    cache = make_cache([0, 4, 2, 1], capacity=10, config=WINDOWED, chunk_size=2)
    other = KVCache.empty(3, 8, WINDOWED, jnp.float32, chunk_size)
    lengths = jnp.array([7, 5, 2], jnp.int32)
    for layer in range(2):
        other = other.fill(layer, tokens(0, 3, 7), -tokens(0, 3, 7), lengths)
    other = dataclasses.replace(other, lengths=lengths)
    found = jax.jit(KVCache.insert, donate_argnums=0)(
        jax.tree.map(jnp.copy, cache), jnp.array([2, -1, 0], jnp.int32), other
    )
    assert found.lengths.tolist() == [2, 4, 7, 1]
    assert found.keys[0].shape == cache.keys[0].shape
    for layer, window in ((0, 3), (1, 10)):
        positions = np.asarray(found.positions(layer, found.lengths))
        for row in (0, 2):
            is_seen = (positions[row] >= 0) & (positions[row] > int(found.lengths[row]) - window)
            assert is_seen.sum() == min(found.lengths[row], window if layer == 1 else window - 1)
            assert found.keys[layer][row, 1, 2, is_seen].tolist() == positions[row][is_seen].tolist()
            assert found.values[layer][row, 0, is_seen, 0].tolist() == (-positions[row][is_seen]).tolist()
        for row in (1, 3):
            np.testing.assert_array_equal(found.keys[layer][row], cache.keys[layer][row])
            np.testing.assert_array_equal(found.values[layer][row], cache.values[layer][row])


@pytest.mark.parametrize(("config", "num_read"), [(CONFIG, 7), (CONFIG, 2), (WINDOWED, 7), (WINDOWED, 2)])
@pytest.mark.parametrize(("capacity", "chunk_size"), [(7, 1), (8, 3), (16, 5)])
def test_a_row_is_taken_with_the_tokens_that_are_seen_from_its_end(config, num_read, capacity, chunk_size):
    """Of the second row its first tokens: all of them, or, where no window has dropped any, fewer. All else is 0."""
    cache = KVCache.empty(2, 9, config, jnp.float32, 2)
    lengths = jnp.array([4, 7 if num_read == 7 or config == CONFIG else 2], jnp.int32)
    for layer in range(2):
        cache = cache.fill(layer, tokens(1, 2, 7), -tokens(1, 2, 7), lengths)
    cache = dataclasses.replace(cache, lengths=lengths)
    take = jax.jit(KVCache.take_row, static_argnames=("capacity", "chunk_size"))
    found = take(cache, jnp.int32(1), jnp.int32(num_read), capacity=capacity, chunk_size=chunk_size)
    assert (found.capacity, found.chunk_size, found.lengths.tolist()) == (capacity, chunk_size, [num_read])
    for layer in range(2):
        window = config.window_of(layer) or num_read
        positions = np.asarray(found.positions(layer, found.lengths))[0]
        keys, values = np.asarray(found.keys[layer][0, 1, 2]), np.asarray(found.values[layer][0, 0, :, 3])
        assert keys.shape == values.shape == positions.shape == (found.num_slots(layer),)
        is_seen = (positions >= 0) & (positions > num_read - 1 - window)
        assert is_seen.sum() == min(num_read, window)
        assert keys[is_seen].tolist() == (positions[is_seen] + 1).tolist()
        assert values[is_seen].tolist() == (-positions[is_seen] - 1).tolist()
        assert not keys[positions < 0].any()
        assert not values[positions < 0].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [1]}, "a row for each of the other cache's 1, got 2"),
        ({"capacity": 4}, "capacity must be at most 3, got 4"),
        ({"config": WINDOWED}, "of the same decoder"),
        ({"config": dataclasses.replace(CONFIG, num_layers=1)}, "of the same decoder"),
        ({"config": dataclasses.replace(CONFIG, head_dim=8)}, "of the same decoder"),
    ],
)
def test_rows_that_do_not_fit_are_not_inserted(changes, message):
    other = make_cache(**{"lengths": [1, 2]} | changes)
    with pytest.raises(ValueError, match=message):
        make_cache([1, 2, 3]).insert(jnp.array([0, 1], jnp.int32), other)


def test_shared_rows_are_neither_inserted_nor_replaced():
    plain, shared = make_cache([1, 2], capacity=1), make_cache([1]).repeat(2, capacity=1)
    for one, other in ((plain, shared), (shared, plain)):
        with pytest.raises(ValueError, match="share a prompt can be neither inserted nor replaced"):
            one.insert(jnp.array([0, 1], jnp.int32), other)


@pytest.mark.parametrize("name", ["num_rows", "capacity", "chunk_size"])
def test_empty_refuses_less_than_one(name):
    sizes = {"num_rows": 1, "capacity": 1, "chunk_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got 0"):
        KVCache.empty(config=CONFIG, dtype=jnp.float32, **sizes)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_cache([0]).lengths = jnp.zeros(1, jnp.int32)
