"""Attention against a float64 loop over rows, queries and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention as module
from models.attention import (
    Scoring,
    Slots,
    attention,
    causal_attention,
    causal_mask,
    ordered_attention,
    slot_attention,
    visible,
)

FLOAT32 = 1e-5  # float32 against float64, values of order 1
SCORINGS = (Scoring(0.5), Scoring(0.25, softcap=0.8))


def draws(*shapes):
    noise = np.random.default_rng(7)
    return [noise.standard_normal(shape).astype(np.float32) for shape in shapes]


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=FLOAT32, atol=FLOAT32)


def attention_loop(queries, keys, values, visible_mask, scoring):
    queries, keys, values = (array.astype(np.float64) for array in (queries, keys, values))
    mixed = np.zeros_like(queries)
    num_heads, num_kv_heads = queries.shape[2], keys.shape[2]
    for row, query, head in np.ndindex(queries.shape[:3]):
        kv_head = head // (num_heads // num_kv_heads)
        slots = np.flatnonzero(visible_mask[row, query])
        scores = keys[row, slots, kv_head] @ queries[row, query, head] * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * np.tanh(scores / scoring.softcap)
        weights = np.exp(scores - scores.max())
        mixed[row, query, head] = weights / weights.sum() @ values[row, slots, kv_head]
    return mixed


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("attend", [attention, ordered_attention])
def test_many_queries_against_a_loop(attend, scoring):
    queries, keys, values = draws((2, 5, 6, 4), (2, 7, 2, 4), (2, 7, 2, 4))
    visible_mask = np.random.default_rng(1).random((2, 5, 7)) < 0.5
    visible_mask[..., 0] = True
    found = attend(*map(jnp.asarray, (queries, keys, values, visible_mask)), scoring)
    close(found, attention_loop(queries, keys, values, visible_mask, scoring))


@pytest.mark.parametrize(("window", "blocks"), [(None, 3), (3, 3), (1, 3), (None, 1), (30, 8)])
def test_blocks_of_queries_are_the_whole(window, blocks, monkeypatch):
    """Ten places in blocks of 4, of 10, or, with at most 8 blocks, of 2: the loop sees all of them at once."""
    sizes = {1: (16, 8), 3: (4, 8), 8: (1, 8)}[blocks]
    monkeypatch.setattr(module, "BLOCK_SIZE", sizes[0])
    monkeypatch.setattr(module, "MAX_BLOCKS", sizes[1])
    queries, keys, values = draws((2, 10, 6, 4), (2, 10, 2, 4), (2, 10, 2, 4))
    found = causal_attention(*map(jnp.asarray, (queries, keys, values)), SCORINGS[1], window)
    is_seen = np.broadcast_to(np.asarray(causal_mask(10, window)), (2, 10, 10))
    close(found, attention_loop(queries, keys, values, is_seen, SCORINGS[1]))


def test_the_gradient_of_blocks_is_that_of_one_program(monkeypatch):
    arrays = [jnp.asarray(x) for x in draws((1, 5, 2, 4), (1, 5, 1, 4), (1, 5, 1, 4))]

    def plain(queries, keys, values):
        scores = jnp.einsum("bthd,bskd->bhts", queries, keys) * 0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(5, dtype=bool)[None, None], scores, -jnp.inf))
        return jnp.einsum("bhts,bskd->bthd", weights, values)

    monkeypatch.setattr(module, "BLOCK_SIZE", 2)
    target = jnp.asarray(draws((1, 5, 2, 4))[0])
    found, expected = (
        jax.grad(lambda *inputs: (attend(*inputs) * target).sum(), argnums=(0, 1, 2))(*arrays)  # noqa: B023
        for attend in (lambda *inputs: causal_attention(*inputs, Scoring(0.5)), plain)
    )
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def slots(keys, values, is_seen):
    """Keys and values [R, S, K, Hd] as a cache holds them."""
    return Slots(jnp.asarray(keys.transpose(0, 2, 3, 1)), jnp.asarray(values.swapaxes(1, 2)), jnp.asarray(is_seen))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_one_query_per_row_against_the_same_loop(scoring):
    queries, keys, values = draws((3, 1, 6, 4), (3, 7, 2, 4), (3, 7, 2, 4))
    is_seen = (np.arange(7)[None] <= np.array([[0], [3], [6]]))[:, None]
    found = slot_attention(jnp.asarray(queries), [slots(keys, values, is_seen)], scoring)
    close(found, attention_loop(queries, keys, values, is_seen, scoring))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("num_queries", [1, 3])
def test_shared_slots_count_like_the_rows_own(num_queries, scoring):
    """Four rows in two groups: the loop sees each group's slots copied in front of the rows' own."""
    queries, keys, values = draws((4, num_queries, 6, 4), (4, 5, 2, 4), (4, 5, 2, 4))
    shared_keys, shared_values = draws((2, 6, 2, 4), (2, 6, 2, 4))
    places = np.arange(num_queries)[None, :, None]
    own_seen = np.arange(5)[None, None] <= np.array([0, 1, 2, 0])[:, None, None] + places
    # The rows of a group may see different slots of it, as with a sliding window; the last row sees none.
    shared_seen = np.arange(6)[None, None] >= np.array([0, 2, 1, 6])[:, None, None] + places
    parts = [slots(keys, values, own_seen), slots(shared_keys, shared_values, shared_seen)]
    found = slot_attention(jnp.asarray(queries), parts, scoring)
    copied = [
        np.concatenate([x.repeat(2, axis=0), y], axis=1) for x, y in ((shared_keys, keys), (shared_values, values))
    ]
    is_seen = np.concatenate([shared_seen, own_seen], axis=2)
    close(found, attention_loop(queries, *copied, is_seen, scoring))


def test_what_is_visible_by_hand():
    assert causal_mask(4, 2)[0].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert (np.asarray(causal_mask(4)[0]) == np.tri(4)).all()
    # Slots hold positions 4, 5, nothing, 3: queries at 5 and 4.
    seen = visible(jnp.array([[5, 4]]), jnp.array([[4, 5, -1, 3]]), 2)
    assert seen[0].astype(int).tolist() == [[1, 1, 0, 0], [1, 0, 0, 1]]
