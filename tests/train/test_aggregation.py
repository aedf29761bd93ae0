import jax.numpy as jnp
import numpy as np
import pytest

from train.aggregation import AGGREGATIONS, Aggregation, aggregation
from train.losses import LossInputs, weighted_total
from train.metrics import masked_mean


def total(losses, mask, weights):
    """The sum that a loss gives back, for token losses that are known."""
    values = jnp.asarray(np.array(losses, np.float32))
    return weighted_total(LossInputs(values, values, values[:, 0], jnp.asarray(mask), weights=weights), values)


def loss(losses, mask, mode, *, max_length=3):
    mask = jnp.asarray(np.array(mask, bool))
    whole = aggregation(mask, mode, max_length=max_length)
    return total(losses, mask, whole.weights) / whole.denominator


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.6),
        ("seq-mean-token-sum", 4.0),
        ("seq-mean-token-mean", 1.5),
        ("constant-length", 1.3333333333),
    ],
)
def test_the_four_modes(mode, expected):
    """P46."""
    losses, mask = [[1.0, 1.0, np.nan], [2.0, 2.0, 2.0]], [[True, True, False], [True, True, True]]
    np.testing.assert_allclose(loss(losses, mask, mode), expected, rtol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_completions_leave_both_sides_of_the_fraction(mode):
    """P43."""
    # 30 tokens of loss 2, of which 5 in a masked completion.
    losses, mask = np.full((6, 5), 2.0), np.ones((6, 5), bool)
    mask[3] = False
    expected = {"seq-mean-token-sum": 10.0}.get(mode, 2.0)
    np.testing.assert_allclose(loss(losses, mask, mode, max_length=5), expected, rtol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_sampled_is_zero_over_a_finite_number(mode):
    """P44."""
    whole = aggregation(jnp.zeros((2, 3), bool), mode, max_length=3)
    assert (np.asarray(whole.weights) == 0).all()
    assert 0 < float(whole.denominator) < np.inf
    assert loss(np.full((2, 3), np.nan), np.zeros((2, 3)), mode) == 0


def test_token_means_of_micro_batches_are_not_averaged():
    """P45."""
    # Means of means would give 3.
    losses, mask = [[1.0] * 4, [5.0, 0.0, 0.0, 0.0]], [[True] * 4, [True, False, False, False]]
    np.testing.assert_allclose(loss(losses, mask, "token-mean"), 1.8, rtol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_any_cut_adds_up_to_the_undivided_loss(mode):
    rng = np.random.default_rng(0)
    mask = np.arange(7) < rng.integers(0, 8, (8, 1))
    losses = rng.normal(size=mask.shape)
    whole = aggregation(jnp.asarray(mask), mode, max_length=7)
    expected = loss(losses, mask, mode, max_length=7)
    for num_parts in (2, 4, 8):
        cut = [np.array_split(array, num_parts) for array in (losses, mask, np.asarray(whole.weights))]
        parts = sum(total(part, rows, jnp.asarray(weights)) for part, rows, weights in zip(*cut, strict=True))
        np.testing.assert_allclose(parts / whole.denominator, expected, atol=1e-6)


def test_weights_are_those_of_the_formulas():
    mask = jnp.array([[True, True, False], [False, False, False], [True, False, False]])
    found = {mode: aggregation(mask, mode, max_length=10) for mode in AGGREGATIONS}
    ones = np.asarray(mask, np.float32)
    halves = np.array([[0.5, 0.5, 0], [0, 0, 0], [1, 0, 0]], np.float32)
    for mode, weights, denominator in (
        ("token-mean", ones, 3),
        ("seq-mean-token-mean", halves, 2),
        ("seq-mean-token-sum", ones, 2),
        ("constant-length", ones, 20),
    ):
        assert isinstance(found[mode], Aggregation)
        np.testing.assert_array_equal(found[mode].weights, weights)
        assert found[mode].denominator == denominator


def test_masked_rows_do_not_pull_logged_means_to_zero():
    """P44."""
    mask = jnp.array([[True], [True], [False], [False]])
    assert masked_mean(jnp.ones((4, 1)), mask) == 1


def test_an_unknown_mode_lists_the_known():
    with pytest.raises(ValueError, match=r"aggregation must be one of token-mean, .*constant-length, got 'mean'"):
        aggregation(jnp.ones((1, 1), bool), "mean", max_length=1)
