import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mock_model import V, random_model

from jaxmask import Finish, RaggedSupport, Rollout, SamplingBatch, SamplingParams, Support, generate
from jaxmask.ragged_support import as_cells

PROMPTS = jnp.array([[3, 1, 4], [1, 5, 0], [9, 2, 6], [3, 0, 0]], jnp.int32)
LENGTHS = jnp.array([3, 2, 3, 1], jnp.int32)
PARAMS = [
    SamplingParams(seed=1, top_k=8, top_p=0.6, max_tokens=3),
    SamplingParams(seed=2, top_k=1, max_tokens=None),
    SamplingParams(seed=3, top_k=8, max_tokens=None),
    SamplingParams(seed=4, top_k=8, top_p=0.9, max_tokens=5),
]


@functools.cache
def rollout(max_ids: int | None = None) -> Rollout:
    batch = SamplingBatch.from_params(PARAMS, vocab_size=V, support_bound=8)
    return generate(random_model(), batch, PROMPTS, LENGTHS, max_new_tokens=6, width=8, max_ids=max_ids)


def test_the_same_supports_in_less_memory():
    cells, ragged = rollout(), rollout(100)
    assert isinstance(ragged.support, RaggedSupport)
    assert ragged.support.to_lists() == cells.support.to_lists()
    for one, other in zip(jax.tree.leaves(as_cells(ragged.support)), jax.tree.leaves(cells.support), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(ragged.token_ids, cells.token_ids)
    np.testing.assert_array_equal(ragged.logprobs, cells.logprobs)
    num_ids = int(cells.support.counts.sum())
    assert int(ragged.support.num_used) == num_ids
    assert (np.asarray(ragged.support.token_ids)[num_ids:] == V).all()
    assert as_cells(cells.support) is cells.support


def test_rows_of_it():
    support, lists = rollout(100).support, rollout().support.to_lists()
    assert support[2].to_lists() == lists[2]
    assert support[1, :2].to_lists() == lists[1][:2]
    assert support[0, 1].to_lists() == lists[0][1]
    assert jax.jit(lambda s, i: s.rows(i, 2).to_support())(support, 1).to_lists() == lists[1:3]


def test_a_row_whose_support_finds_no_room_ends_before_it():
    """Nothing is lost: tokens before it stand; rows that ask for less go on."""
    whole = rollout()
    counts = np.asarray(whole.support.counts)
    # Room for the first two steps, and for the one-id row of the third.
    room = int(counts[:, :2].sum()) + int(counts[0, 2]) + 1
    assert counts[0, 2] + 1 < counts[:, 2].sum()
    cut = rollout(room)
    assert cut.finish.tolist() == [Finish.LENGTH, Finish.OVERFLOW, Finish.OVERFLOW, Finish.OVERFLOW]
    assert cut.lengths.tolist() == [3, 3, 2, 2]
    assert int(cut.support.num_used) == room
    for row, length in enumerate(cut.lengths.tolist()):
        assert cut.token_ids[row, :length].tolist() == whole.token_ids[row, :length].tolist()
        assert not np.asarray(cut.token_ids)[row, length:].any()
        assert cut.support[row, :length].to_lists() == whole.support[row, :length].to_lists()
        assert not np.asarray(cut.support.counts)[row, length:].any()


def test_one_row_that_asks_for_too_much_leaves_the_others_their_room():
    lists = [[[1]], [[2, 3, 4]], [[5]], [[6, 7]]]
    new = Support.from_lists([row for rows in lists for row in rows], vocab_size=20, width=3).reshape(4, 1)
    columns, counts = jnp.zeros((4, 1), jnp.int32), jnp.ones(4, jnp.int32)
    written, kept = RaggedSupport.empty((4, 2), 3, 3, 20).write(new, columns, counts)
    assert kept.tolist() == [1, 0, 1, 0]
    assert written.to_lists() == [[[1], []], [[], []], [[5], []], [[], []]]
    assert int(written.num_used) == 2
    again, kept = written.write(new[jnp.array([0, 0, 0, 0])], columns + 1, jnp.array([0, 0, 1, 1], jnp.int32))
    assert kept.tolist() == [0, 0, 1, 0]
    assert again.to_lists() == [[[1], []], [[], []], [[5], [1]], [[], []]]


def test_many_tokens_at_once():
    """A row stops at the first of its tokens that finds no room; the one behind it would leave a gap."""
    lists = [[[1, 2], [3], [4, 5, 6]], [[7], [8, 9, 10], [11]], [[], [], [12]]]
    new = Support.from_lists([row for rows in lists for row in rows], vocab_size=20, width=4).reshape(3, 3)
    columns = jnp.tile(jnp.array([[2, 3, 4]], jnp.int32), (3, 1))
    empty = RaggedSupport.empty((3, 5), 9, 4, 20)
    written, kept = empty.write(new, columns, jnp.array([2, 3, 1], jnp.int32))
    assert kept.tolist() == [2, 3, 1]
    assert written.to_lists() == [[[], [], [1, 2], [3], []], [[], [], [7], [8, 9, 10], [11]], [[]] * 5]
    written, kept = RaggedSupport.empty((3, 5), 6, 4, 20).write(new, columns, jnp.array([2, 3, 3], jnp.int32))
    assert kept.tolist() == [2, 1, 3]
    assert written.to_lists() == [[[], [], [1, 2], [3], []], [[], [], [7], [], []], [[], [], [], [], [12]]]
    assert int(written.num_used) == 5


def test_what_does_not_fit_is_refused():
    wide = SamplingBatch.from_params([SamplingParams(top_p=0.9)] * 4, vocab_size=V)
    with pytest.raises(ValueError, match="max_ids needs supports of at most width=8 ids"):
        generate(random_model(), wide, PROMPTS, LENGTHS, max_new_tokens=2, width=8, max_ids=10)
    for max_ids, message in (
        (0, "max_ids must be at least 1, got 0"),
        (2**30 + 1, "max_ids must be at most 1073741824"),
    ):
        with pytest.raises(ValueError, match=message):
            RaggedSupport.empty((2, 2), max_ids, 8, V)
