import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask import Support
from jaxmask.kernels import dispatch
from jaxmask.kernels.compact import compact_support

INF = np.inf
ON_EVERY_PLATFORM = ("auto", "xla", "interpret")


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


def rows_of(vocab_size, width, dtype):
    """All kept, none, one at either end, width - 1 to width + 1 kept, NaN and infinities, and rows at random."""
    rng = np.random.default_rng([vocab_size, width])
    sizes = [
        vocab_size,
        0,
        1,
        1,
        *(min(max(width + d, 0), vocab_size) for d in (-1, 0, 1)),
        *rng.integers(0, vocab_size, 3),
    ]
    logits = np.full((len(sizes) + 3, vocab_size), -INF, np.float32)
    for row, size in zip(logits, sizes, strict=False):
        row[rng.permutation(vocab_size)[:size]] = rng.normal(size=size) * 100
    logits[2:4] = -INF
    logits[2, 0] = logits[3, -1] = 1
    # A block ends at 4096: ids on both sides of it, and nothing else.
    logits[-3, max(0, min(4090, vocab_size - 8)) :][:12] = -3e38
    logits[-2] = np.nan
    logits[-2, ::3] = 0
    logits[-1] = INF
    logits[-1, 1::2] = -0.0
    return jnp.asarray(logits).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("vocab_size", "width"),
    [(1, 1), (7, 3), (8, 8), (9, 16), (4095, 4), (4096, 64), (4097, 5000), (5003, 1), (151_936, 1024)],
)
def test_the_kernel_is_the_reference(vocab_size, width, dtype):
    logits = rows_of(vocab_size, width, dtype)
    kept = np.isfinite(np.asarray(logits.astype(jnp.float32)))
    support = compact_support(logits, width, implementation="interpret")
    reference = compact_support(logits, width, implementation="xla")
    np.testing.assert_array_equal(support.counts, kept.sum(axis=1))
    np.testing.assert_array_equal(support.token_ids, reference.token_ids)
    np.testing.assert_array_equal(support.counts, reference.counts)
    assert (support.packed is None) == (reference.packed is None) == (width >= vocab_size)
    if support.packed is not None:
        np.testing.assert_array_equal(support.packed, np.packbits(kept, axis=1, bitorder="little"))
        np.testing.assert_array_equal(support.packed, reference.packed)
    ids = np.asarray(support.token_ids)
    for row in range(len(kept)):
        expected = np.flatnonzero(kept[row])[:width]
        np.testing.assert_array_equal(
            ids[row], np.pad(expected, (0, width - len(expected)), constant_values=vocab_size)
        )


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_bits_are_there_only_where_a_support_may_not_fit(implementation):
    logits = jnp.where(jnp.arange(100, dtype=jnp.int32)[None, :] < 20, 0.0, -INF)
    assert compact_support(logits, 20, support_bound=20, implementation=implementation).packed is None
    promised = compact_support(logits, 20, support_bound=19, implementation=implementation)
    assert promised.packed is None
    assert promised.to_lists() == [list(range(20))]
    assert compact_support(logits, 20, support_bound=21, implementation=implementation).packed is not None
    assert compact_support(logits, 100, implementation=implementation).packed is None
    assert compact_support(logits, 8, implementation=implementation).to_lists() == [list(range(20))]


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_far_more_cells_than_ids(implementation):
    """The kernel's part of it is bounded by the vocabulary: 2^20 cells of a row as one block do not compile."""
    support = compact_support(jnp.zeros((1, 70)), 1 << 20, implementation=implementation)
    assert support.token_ids.shape == (1, 1 << 20)
    assert support.token_ids[0, 68:72].tolist() == [68, 69, 70, 70]


def test_errors():
    names = ", ".join(dispatch.IMPLEMENTATIONS)
    with pytest.raises(ValueError, match=f"implementation must be one of {names}, got 'triton'"):
        compact_support(jnp.zeros((1, 4)), 2, implementation="triton")
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        compact_support(jnp.zeros((1, 4)), 0)
    with pytest.raises(ValueError, match="support_bound must be at least 1, got 0"):
        compact_support(jnp.zeros((1, 4)), 2, support_bound=0)


def test_wrong_types(unchecked):
    with pytest.raises(
        ValueError, match=r"processed_logits must be floating-point numbers \[R, V\], got int32\[1, 4\]"
    ):
        compact_support(jnp.zeros((1, 4), jnp.int32), 2)
    with pytest.raises(ValueError, match=r"got float32\[4\]"):
        compact_support(jnp.zeros(4), 2)


def test_no_rows():
    for implementation in ON_EVERY_PLATFORM:
        assert compact_support(jnp.zeros((0, 9)), 2, implementation=implementation).to_lists() == []
