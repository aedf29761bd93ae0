"""Logits of kept ids: values and gradients against float64, whatever lies in cells and rows that are left out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

from jaxmask import gathered

D, U = 7, 211
SIZE = gathered.block_size(D)


def case(counts, width, seed=0):
    """Float64 states and head, ids of each row with V past its count, and a cotangent."""
    rng = np.random.default_rng([seed, len(counts)])
    ids = np.full((len(counts), width), U, np.int32)
    for row, count in zip(ids, counts, strict=True):
        row[:count] = np.sort(rng.permutation(U)[:count])
    return rng.normal(size=(len(counts), D)), rng.normal(size=(U, D)), ids, rng.normal(size=ids.shape)


def right(hidden, head, ids, counts, d_kept):
    """Kept logits, and the gradients of their sum weighted by `d_kept`."""
    is_scored = np.arange(ids.shape[1])[None, :] < counts[:, None]
    safe = np.where(is_scored, ids, 0)
    kept = np.where(is_scored, np.einsum("nd,nwd->nw", hidden, head[safe]), 0)
    weights = np.where(is_scored, d_kept, 0)
    d_head = np.zeros(head.shape)
    np.add.at(d_head, safe, weights[:, :, None] * hidden[:, None, :])
    return kept, np.einsum("nw,nwd->nd", weights, head[safe]), d_head


def first(ids, counts):
    return gathered.Cells(ids, jnp.zeros_like(counts), counts)


@functools.partial(jax.jit, static_argnames="dtype")
def score_and_pull(hidden, head, ids, counts, d_kept, dtype="float32"):
    arrays = hidden.astype(dtype), head.astype(dtype)
    kept, pull = jax.vjp(lambda hidden, head: gathered.kept_logits(hidden, head, first(ids, counts)), *arrays)
    return kept, *pull(d_kept)


def f32(x):
    return jnp.asarray(np.asarray(x, np.float32))


def run(hidden, head, ids, counts, d_kept, dtype="float32"):
    return score_and_pull(
        f32(hidden), f32(head), jnp.asarray(ids), jnp.asarray(counts.astype(np.int32)), f32(d_kept), dtype
    )


COUNTS = {
    "none": [0, 0, 0],
    "ones": [1, 1, 1, 1],
    "one block": [0, 3, 1, 5, 0, 2, 1, 9],
    "a block and no more": [16] * (SIZE // 16),
    "a block and one cell": [16] * (SIZE // 16) + [1, 2],
    "many blocks": [int(count) for count in np.random.default_rng(0).integers(0, 17, 300)],
    "rows across the borders of blocks": [2, *[200] * 11, 1, 3],
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_values_and_gradients(counts):
    counts = np.array(counts)
    arrays = case(counts, max(16, counts.max()))
    expected = right(*arrays[:3], counts, arrays[3])
    for found, true in zip(run(*arrays[:3], counts, arrays[3]), expected, strict=True):
        np.testing.assert_allclose(found, true, rtol=0, atol=tolerances.GRADIENT * max(1, np.abs(true).max()))


def test_bfloat16_is_summed_in_float32():
    counts = np.array(COUNTS["many blocks"])
    hidden, head, ids, d_kept = case(counts, 16)
    hidden, head = (np.asarray(f32(x).astype(jnp.bfloat16), np.float64) for x in (hidden, head))
    kept, d_hidden, d_head = run(hidden, head, ids, counts, d_kept, "bfloat16")
    expected = right(hidden, head, ids, counts, d_kept)
    assert kept.dtype == jnp.float32
    np.testing.assert_allclose(kept, expected[0], rtol=0, atol=tolerances.GRADIENT * np.abs(expected[0]).max())
    for found, true in zip((d_hidden, d_head), expected[1:], strict=True):
        assert found.dtype == jnp.bfloat16
        scale = np.abs(true).max()
        np.testing.assert_allclose(found.astype(jnp.float32), true, rtol=0, atol=tolerances.BFLOAT16_GRADIENT * scale)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_what_is_left_out_changes_nothing(garbage):
    """Unused cells, rows without ids, rows whose cotangent is 0, rows of the head that no support has."""
    counts = np.array([4, 0, 1, 6, 3, 2, 5])
    hidden, head, ids, d_kept = case(counts, 8)
    d_kept[4] = 0
    clean = run(hidden, head, ids, counts, d_kept)
    is_used = np.zeros(U, bool)
    for row, count in zip(ids, counts, strict=True):
        is_used[row[:count]] = True
        row[count:] = -7
    hidden[1] = garbage
    head[~is_used] = garbage
    dirty = run(hidden, head, ids, counts, d_kept)
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, other)
    # A state whose tokens are not trained on is scored, and moves nothing.
    hidden[4] = garbage
    kept, d_hidden, d_head = run(hidden, head, ids, counts, d_kept)
    np.testing.assert_array_equal(d_hidden, clean[1])
    np.testing.assert_array_equal(d_head, clean[2])
    assert not np.isfinite(kept[4, :3]).any()
    assert not np.asarray(d_head)[~is_used].any()


def test_work_follows_the_ids():
    """The loop's length is the number of blocks in use, and no array has a place for every cell's row of the head."""
    assert gathered._num_blocks(jnp.array([0, 1, 253, 0, 2], jnp.int32), 256) == 1
    assert gathered._num_blocks(jnp.array([0, 1, 254, 0, 2], jnp.int32), 256) == 2
    assert gathered._num_blocks(jnp.zeros(1000, jnp.int32), 256) == 0
    assert [gathered.block_size(depth) for depth in (1, 512, 576, 2048, 8192, 100_000)] == [
        1024,
        1024,
        512,
        256,
        64,
        64,
    ]


def test_cells_may_start_anywhere():
    """As those of a slice of the vocabulary do."""
    hidden, head, ids, _ = case(np.array([6, 6, 6]), 6)
    starts, counts = jnp.array([2, 0, 5], jnp.int32), jnp.array([3, 0, 1], jnp.int32)
    kept = gathered.kept_logits(f32(hidden), f32(head), gathered.Cells(jnp.asarray(ids), starts, counts))
    expected = np.zeros((3, 6))
    for row, columns in ((0, [2, 3, 4]), (2, [5])):
        expected[row, columns] = head[ids[row, columns]] @ hidden[row]
    np.testing.assert_allclose(kept, expected, rtol=0, atol=tolerances.LOGPROB)


def test_under_vmap_and_scan():
    counts = np.array([[3, 0, 2], [1, 5, 4]])
    parts = [case(row, 6, seed) for seed, row in enumerate(counts)]
    arrays = [jnp.stack([f32(part[field]) for part in parts]) for field in (0, 1)]
    ids = jnp.stack([jnp.asarray(part[2]) for part in parts])
    arguments = (*arrays, ids, jnp.asarray(counts.astype(np.int32)))

    def total(hidden, head, ids, counts):
        return gathered.kept_logits(hidden, head, first(ids, counts)).sum()

    gradient = jax.grad(total, argnums=(0, 1))
    alone = [gradient(*(leaf[part] for leaf in arguments)) for part in range(2)]
    together = jax.vmap(gradient)(*arguments)
    in_turn = jax.lax.scan(lambda _, leaf: (None, gradient(*leaf)), None, arguments)[1]
    for field in range(2):
        expected = np.stack([one[field] for one in alone])
        np.testing.assert_allclose(together[field], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(in_turn[field], expected, rtol=1e-6, atol=1e-6)


def test_second_derivatives():
    """Hessian-vector products, reverse over reverse, against the plain formula."""
    counts = np.array([4, 1, 0, 3, 6])
    hidden, head, ids, _ = case(counts, 6)
    rng = np.random.default_rng(1)
    directions = f32(rng.normal(size=hidden.shape)), f32(rng.normal(size=head.shape))
    columns, sizes = jnp.asarray(ids), jnp.asarray(counts.astype(np.int32))
    is_scored = (jnp.arange(6, dtype=jnp.int32)[None, :] < sizes[:, None]) & (sizes > 1)[:, None]

    def plain(hidden, head):
        safe = jnp.where(is_scored, columns, 0)
        return jnp.where(is_scored, jnp.einsum("nd,nwd->nw", hidden, head[safe], precision="highest"), 0.0)

    def product(kept):
        def loss(hidden, head):
            return jnp.where(is_scored, jax.nn.log_softmax(kept(hidden, head), where=is_scored), 0.0)[:, 0].sum()

        def along(hidden, head):
            slopes = jax.grad(loss, argnums=(0, 1))(hidden, head)
            return sum(jnp.vdot(slope, direction) for slope, direction in zip(slopes, directions, strict=True))

        return jax.grad(along, argnums=(0, 1))(f32(hidden), f32(head))

    found = product(lambda hidden, head: gathered.kept_logits(hidden, head, first(columns, sizes)))
    for one, true in zip(found, product(plain), strict=True):
        assert np.abs(true).max() > 0.1
        np.testing.assert_allclose(one, true, rtol=0, atol=tolerances.GRADIENT * max(1, np.abs(true).max()))
