import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask import Support
from jaxmask.kernels.compact import compact_support
from jaxmask.kernels.compact.api import IMPLEMENTATIONS

INF = np.inf
ON_EVERY_PLATFORM = ("auto", "xla")


@pytest.mark.parametrize("implementation", ON_EVERY_PLATFORM)
@pytest.mark.parametrize(("vocab_size", "width"), [(7, 3), (64, 64), (257, 8)])
def test_finite_entries(implementation, vocab_size, width):
    rng = np.random.default_rng([vocab_size, width])
    logits = rng.normal(size=(60, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < rng.random((60, 1))] = -INF
    logits[rng.random(logits.shape) < 0.1] = rng.choice([np.nan, INF, -INF])
    logits[:2] = [[-INF], [np.nan]]
    support = compact_support(jnp.asarray(logits), width, implementation=implementation)
    assert support.to_lists() == [np.flatnonzero(np.isfinite(row)).tolist() for row in logits]
    other = Support.from_logits(jnp.asarray(logits), width)
    np.testing.assert_array_equal(support.token_ids, other.token_ids)
    np.testing.assert_array_equal(support.counts, other.counts)
    if other.packed is None:
        assert support.packed is None
    else:
        np.testing.assert_array_equal(support.packed, other.packed)


@pytest.mark.parametrize("implementation", ON_EVERY_PLATFORM)
def test_vllm_vectors(implementation):
    """Source: vLLM, tests/v1/test_outputs.py: ties past the width are whole, and rows of processed logits."""
    ties = jnp.array([[6, 5, 4, 4, 4, -INF, -INF]], jnp.float32)
    support = compact_support(ties, 3, implementation=implementation)
    assert support.to_lists() == [[0, 1, 2, 3, 4]]
    assert support.token_ids.tolist() == [[0, 1, 2]]
    rows = jnp.array([[1, -INF, 2], [3, 4, -INF], [-INF, 5, 6]], jnp.float32)
    assert compact_support(rows, 3, implementation=implementation).to_lists() == [[0, 2], [0, 1], [1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("width", [512, 20_001])
def test_vllm_support_sizes(width):
    """Source: vLLM, tests/v1/test_outputs.py, compact against dense."""
    V, sizes = 20_001, [0, 1, 7, 511, 512, 513, 2053, 20_001, 40, 3]
    rng = np.random.default_rng(0)
    logits = np.full((len(sizes), V), -INF, np.float32)
    kept = [np.sort(rng.permutation(V)[:size]).tolist() for size in sizes]
    for row, ids in zip(logits, kept, strict=True):
        row[ids] = rng.normal(size=len(ids))
    assert compact_support(jnp.asarray(logits), width).to_lists() == kept


def test_errors():
    with pytest.raises(ValueError, match=f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got 'triton'"):
        compact_support(jnp.zeros((1, 4)), 2, implementation="triton")
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        compact_support(jnp.zeros((1, 4)), 0)
