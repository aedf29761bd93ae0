import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rows

from jaxmask import SamplingBatch, SamplingParams, bisection, filters


def keep(logits: np.ndarray, params: list[SamplingParams]) -> np.ndarray:
    x = jnp.asarray(oracle.finite_or_excluded(logits))
    batch = SamplingBatch.from_params(params, vocab_size=x.shape[1])
    z = filters.temper(x, x.max(axis=1), batch.temperature)
    return np.asarray(bisection.keep(x, z, batch.min_p, batch.top_k, batch.top_p))


@pytest.mark.parametrize("vocab_size", [1, 300])
def test_every_filter_on_every_kind_of_row(vocab_size):
    grid = rows.filter_grid(vocab_size)
    logits = rows.adversarial(np.random.default_rng(vocab_size), len(grid), vocab_size)
    kept, truth = keep(logits, grid), oracle.truth(logits, grid)
    length = kept.sum(axis=1)
    assert ((truth.low <= length) & (length <= truth.high)).all()
    np.testing.assert_array_equal(kept, truth.keep(length))
    assert truth.is_exact.mean() > 0.8


def test_ties_are_taken_by_id():
    """P01, P03, and an exact boundary inside a tie."""
    logits = np.array([[1, 2, 2, 2, 3], [0, 0, 0, 0, -9], [1, 1, 1, 1, 1]], np.float32)
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(top_p=1e-8)]
    assert [np.flatnonzero(row).tolist() for row in keep(logits, params)] == [[1, 2, 4], [0, 1, 2], [0]]
    equal = keep(np.zeros((7, 8)), [SamplingParams(top_p=n / 8) for n in range(1, 8)])
    assert [np.flatnonzero(row).tolist() for row in equal] == [list(range(n)) for n in range(1, 8)]


def test_one_large_tie():
    """vLLM's vector: 1000 tied tokens at top_p 0.5 keep the first 500."""
    (kept,) = keep(np.zeros((1, 1000)), [SamplingParams(top_p=0.5)])
    assert np.flatnonzero(kept).tolist() == list(range(500))


def test_rows_with_filters_off_keep_every_token_beside_rows_with_filters_on():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]] * 3))
    params = [SamplingParams(), SamplingParams(top_k=2, top_p=0.5), SamplingParams(min_p=0.6)]
    assert [np.flatnonzero(row).tolist() for row in keep(logits, params)] == [[0, 1, 2, 3], [0], [0, 1]]
