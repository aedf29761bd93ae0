import jax.numpy as jnp
import numpy as np
import pytest
import rows

from jaxmask import candidates


def canonical(logits: np.ndarray) -> np.ndarray:
    """Ids by (logit descending, id ascending), on exact float64 values of the float32 logits."""
    return np.argsort(-logits.astype(np.float64), axis=1, kind="stable")


def finite(logits: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(logits), logits, np.float32(-np.inf))


def test_keys_have_the_order_of_the_logits():
    """Also of subnormals, which float comparisons may flush to zero; -0 and 0 are one."""
    tiny = np.float32(1e-45)
    ascending = np.array(
        [
            -3.4e38,
            -3e38,
            -1,
            -1e-38,
            -2 * tiny,
            -tiny,
            0,
            tiny,
            2 * tiny,
            1.2e-38,
            1,
            np.nextafter(np.float32(1), 2),
            3e38,
        ],
        np.float32,
    )
    keys = np.asarray(candidates.order_keys(jnp.asarray(ascending[None])))[0]
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    zeros = candidates.order_keys(jnp.array([[0.0, -0.0]]))[0]
    assert int(zeros[0]) == int(zeros[1]) == keys[6]
    out = candidates.order_keys(jnp.array([[jnp.nan, -jnp.nan, jnp.inf, -jnp.inf]]))
    assert out.tolist() == [[0, 0, 0, 0]]
    assert keys.min() > 0


def test_keys_of_random_bit_patterns():
    """Any two floats compare like their keys."""
    words = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    x = words.view(np.float32)
    x = x[np.isfinite(x)]
    keys = np.asarray(candidates.order_keys(jnp.asarray(x[None])))[0].astype(np.int64)
    a, b = x[:-1].astype(np.float64), x[1:].astype(np.float64)
    np.testing.assert_array_equal(np.sign(a - b), np.sign(keys[:-1] - keys[1:]))


@pytest.mark.parametrize(("vocab_size", "num"), [(7, 7), (257, 48), (1000, 64)])
def test_leading_columns_are_the_head_of_the_canonical_order(vocab_size, num):
    rng = np.random.default_rng([vocab_size, num])
    logits = finite(rows.adversarial(rng, 360, vocab_size))
    num_chunks = -(-vocab_size // candidates.CHUNK)
    top_k = rng.integers(1, num_chunks + 3, 360).astype(np.int32)
    columns = candidates.leading_columns(jnp.asarray(logits), jnp.asarray(top_k), num)
    is_complete = np.asarray(columns.is_complete)
    if num == vocab_size:
        assert is_complete.all()
    else:
        assert not is_complete[top_k > num_chunks].any()
        # Rows of normal logits (every 18th) fit while k is well below the number of chunks.
        is_plain = (np.arange(360) % 18 == 0) & (top_k <= num_chunks // 2)
        assert is_complete[is_plain].all()
        assert is_plain.any()
    order = canonical(logits)
    for row in np.flatnonzero(is_complete):
        num_finite = int(np.isfinite(logits[row]).sum())
        head = min(int(top_k[row]), num_finite) if num < vocab_size else num_finite
        assert columns.token_ids[row, :head].tolist() == order[row, :head].tolist()
        np.testing.assert_array_equal(np.asarray(columns.logits)[row, :head], logits[row, order[row, :head]])
        rest = np.asarray(columns.logits)[row, num_finite:]
        assert np.isneginf(rest).all()


def test_too_many_ties_are_flagged_and_a_fitting_number_is_not():
    V, num = 256, 40
    logits = np.full((3, V), -1, np.float32)
    logits[0, :num] = 1
    logits[1, : num + 1] = 1
    logits[2, ::7] = 1
    columns = candidates.leading_columns(jnp.asarray(logits), jnp.ones(3, jnp.int32), num)
    assert columns.is_complete.tolist() == [True, False, True]
    assert columns.token_ids[0].tolist() == list(range(num))
    assert columns.token_ids[2, :3].tolist() == [0, 7, 14]


def test_number_of_columns():
    assert candidates.num_columns(8, 1000) == 48
    assert candidates.num_columns(8, 20) == 20
