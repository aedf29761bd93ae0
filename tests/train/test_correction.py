import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.correction import sequence_mask, truncated_importance_weights

MASK = jnp.array([[True, True], [True, False]])


def both(ratios):
    """Log-probabilities with these ratios."""
    return jnp.asarray((np.log(np.array(ratios)) - 1).astype(np.float32)), jnp.full(np.shape(ratios), -1.0)


def test_weights_are_cut_at_the_cap_alone():
    weights = truncated_importance_weights(*both([[0.25, 3.0], [1.5, 9.0]]), MASK, cap=2.0)
    np.testing.assert_allclose(weights, [[0.25, 2.0], [1.5, 1.0]], rtol=1e-6)


def test_the_policys_own_tokens_weigh_one():
    logprobs, behaviour = both(np.ones((2, 2)))
    assert (np.asarray(truncated_importance_weights(logprobs, behaviour, MASK, cap=1.0)) == 1).all()
    assert (np.asarray(sequence_mask(logprobs, behaviour, MASK, low=1.0, high=1.0)) == 1).all()


def test_weights_have_no_gradient_and_stay_finite():
    def total(logprobs):
        return truncated_importance_weights(logprobs, jnp.zeros((2, 2)), MASK, cap=1e6).sum()

    for log_ratio in (100.0, 0.1, -100.0):
        value, slope = jax.value_and_grad(total)(jnp.full((2, 2), log_ratio))
        assert np.isfinite(value)
        assert (np.asarray(slope) == 0).all()


@pytest.mark.parametrize(
    ("ratio", "low", "high", "expected"),
    [
        # Geometric means: sqrt(.5 * 1.125) = .75, and 1.5 (the second cell of the second row is not sampled).
        ("geometric-mean", 0.74, 2.0, [1, 1]),
        ("geometric-mean", 0.76, 2.0, [0, 1]),
        ("geometric-mean", 0.0, 1.4, [1, 0]),
        ("max", 0.4, 1.6, [1, 1]),
        ("max", 0.6, 1.6, [0, 1]),
        ("max", 0.0, 1.2, [1, 0]),
        ("max", 0.0, 1.1, [0, 0]),
    ],
)
def test_sequences_are_kept_within_the_band(ratio, low, high, expected):
    logprobs, behaviour = both([[0.5, 1.125], [1.5, 1e9]])
    kept = sequence_mask(logprobs, behaviour, MASK, low=low, high=high, ratio=ratio)
    np.testing.assert_array_equal(kept, expected)


def test_only_bad_completions_are_dropped_where_advantages_are_given():
    logprobs, behaviour = both([[0.5, 0.5], [0.5, 1.0], [0.5, 0.5]])
    kept = sequence_mask(
        logprobs, behaviour, jnp.ones((3, 2), bool), low=float(np.exp(-0.5)), advantages=jnp.array([-1.0, -1.0, 1.0])
    )
    # Means of log(behaviour / pi): ln 2 > 0.5, ln 2 / 2 < 0.5, and a good completion.
    np.testing.assert_array_equal(kept, [0, 1, 1])


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ratio", ["geometric-mean", "max"])
def test_cells_outside_the_mask_change_nothing(garbage, ratio):
    logprobs, behaviour = both([[0.5, 1.125], [1.5, 1.0]])
    dirty = jnp.where(MASK, logprobs, garbage)
    for base in (behaviour, jnp.where(MASK, behaviour, garbage)):
        np.testing.assert_array_equal(
            sequence_mask(dirty, base, MASK, low=0.7, high=1.6, ratio=ratio), [float(ratio == "geometric-mean"), 1.0]
        )
        np.testing.assert_array_equal(
            truncated_importance_weights(dirty, base, MASK, cap=2.0),
            truncated_importance_weights(logprobs, behaviour, MASK, cap=2.0),
        )


def test_an_empty_sequence_is_kept():
    empty = jnp.zeros((2, 2), bool)
    for ratio in ("geometric-mean", "max"):
        assert (np.asarray(sequence_mask(*both([[9.0, 9.0]] * 2), empty, high=1.1, ratio=ratio)) == 1).all()


def test_what_is_out_of_range_is_named():
    given = (*both(np.ones((2, 2))), MASK)
    with pytest.raises(ValueError, match=r"cap must be > 0, got nan"):
        truncated_importance_weights(*given, cap=float("nan"))
    with pytest.raises(ValueError, match="ratio must be one of geometric-mean, max, got 'mean'"):
        sequence_mask(*given, ratio="mean")
    for band in ({"low": 1.5}, {"high": 0.5}, {"low": float("nan")}):
        with pytest.raises(ValueError, match=r"low must be in \[0, 1\] and high at least 1"):
            sequence_mask(*given, **band)
