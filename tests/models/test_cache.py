import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import KVCache


def make_cache(lengths, capacity=3):
    """Slot s of row b holds 10 b + s in every cell; values are negative."""
    rows, slots = np.arange(len(lengths)), np.arange(capacity)
    cells = (10.0 * rows[:, None] + slots)[..., None, None] * np.ones((1, 1, 2, 4))
    keys = jnp.asarray(cells, jnp.float32)
    return KVCache((keys, keys), (-keys, -keys), jnp.asarray(lengths, jnp.int32))


def test_repeat_puts_copies_side_by_side():
    cache = make_cache([1, 2]).repeat(3)
    assert cache.keys[1][:, 0, 0, 0].tolist() == [0, 0, 0, 10, 10, 10]
    assert cache.values[0][:, 1, 1, 3].tolist() == [-1, -1, -1, -11, -11, -11]
    assert cache.lengths.tolist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("group_size", [0, -1])
def test_repeat_refuses_less_than_one_copy(group_size):
    with pytest.raises(ValueError, match=f">= 1, got {group_size}"):
        make_cache([1]).repeat(group_size)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_write_lands_at_each_rows_own_length_and_a_full_row_drops_it(transform):
    before = make_cache([0, 3, 2])
    token = jnp.full((3, 2, 4), 99.0)
    after = transform(lambda cache: cache.write(1, token, -token).advance())(before)
    assert after.keys[1][:, :, 0, 0].tolist() == [[99, 1, 2], [10, 11, 12], [20, 21, 99]]
    assert after.values[1][:, :, 1, 3].tolist() == [[-99, -1, -2], [-10, -11, -12], [-20, -21, -99]]
    assert after.lengths.tolist() == [1, 3, 3]
    np.testing.assert_array_equal(after.keys[0], before.keys[0])
    np.testing.assert_array_equal(after.values[0], before.values[0])


def test_capacity_is_the_number_of_slots_and_records_are_frozen():
    cache = make_cache([0], capacity=5)
    assert cache.capacity == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.lengths = jnp.zeros(1, jnp.int32)
