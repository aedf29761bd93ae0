import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.losses import LossInputs, grpo_loss


def inputs(log_ratio, advantages, mask=None):
    log_ratio = jnp.asarray(np.array(log_ratio, np.float32))
    mask = jnp.ones(log_ratio.shape, bool) if mask is None else jnp.asarray(np.array(mask, bool))
    return LossInputs(
        log_ratio - 1.0, jnp.full(log_ratio.shape, -1.0), jnp.asarray(np.array(advantages, np.float32)), mask
    )


def test_hand_computed_clips():
    ratios = np.array([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
    output = grpo_loss(inputs(np.log(ratios), [2.0, -1.0]), clip_epsilon=0.2)
    # A = 2: min(ratio, clip) = .5, 1, 1.2.  A = -1: max(ratio, clip) = .8, 1, 1.5.
    np.testing.assert_allclose(output.total, -2 * (0.5 + 1 + 1.2) + (0.8 + 1 + 1.5), rtol=1e-6)
    assert output.num_tokens == 6
    assert output.num_clipped == 2
    np.testing.assert_allclose(output.ratio, ratios, rtol=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"), [(100.0, 0.0, 0.0, 0.0), (100.0, 1.0, -1.2, 0.0)]
)
def test_huge_ratios_neither_overflow_nor_pull(log_ratio, advantage, loss, gradient):
    given = inputs([[log_ratio]], [advantage])

    def total(logprobs):
        return grpo_loss(dataclasses.replace(given, logprobs=logprobs), clip_epsilon=0.2).total

    value, slope = jax.value_and_grad(total)(given.logprobs)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    assert float(slope[0, 0]) == gradient


def test_a_huge_ratio_on_a_bad_completion_stays_finite():
    value, slope = jax.value_and_grad(
        lambda lp: (
            grpo_loss(
                LossInputs(lp, jnp.zeros((1, 1)), jnp.array([-1.0]), jnp.ones((1, 1), bool)), clip_epsilon=0.2
            ).total
        )
    )(jnp.array([[100.0]]))
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 7.0])
def test_cells_outside_the_mask_change_nothing_bit_for_bit(garbage):
    mask = np.array([[True, True, False], [True, False, False]])
    log_ratio = np.where(mask, 0.1, 0.0)

    def run(fill):
        given = inputs(log_ratio, [1.0, -2.0], mask)
        dirty = dataclasses.replace(
            given,
            logprobs=jnp.where(mask, given.logprobs, fill),
            behaviour_logprobs=jnp.where(mask, given.behaviour_logprobs, fill),
        )
        return jax.value_and_grad(
            lambda lp: grpo_loss(dataclasses.replace(dirty, logprobs=lp), clip_epsilon=0.2).total
        )(dirty.logprobs)

    (clean, clean_slope), (value, slope) = run(0.0), run(garbage)
    assert value == clean
    np.testing.assert_array_equal(slope, clean_slope)
    assert (np.asarray(slope)[~mask] == 0).all()


def test_an_empty_mask_gives_zero():
    output = grpo_loss(inputs([[0.3, 0.1]], [1.0], [[False, False]]), clip_epsilon=0.2)
    assert output.total == 0
    assert output.num_tokens == 0
