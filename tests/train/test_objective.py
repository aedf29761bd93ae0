import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.config import GRPOConfig
from train.losses import LossInputs, cispo_loss, grpo_loss, gspo_loss, gspo_token_loss, reinforce_loss
from train.objective import objective


def given(ratios=((0.5, 1.5, 1.0), (2.0, 3.0, 1.0))):
    ratios = np.array(ratios)
    return LossInputs(
        logprobs=jnp.asarray((np.log(ratios) - 1).astype(np.float32)),
        behaviour_logprobs=jnp.full(ratios.shape, -1.0),
        advantages=jnp.array([1.0, -1.0]),
        loss_mask=jnp.array([[True, True, False], [True, True, False]]),
        weights=jnp.full(ratios.shape, 0.5),
        entropy=jnp.full(ratios.shape, 2.0),
    )


def value_and_slope(config, inputs):
    return jax.value_and_grad(lambda lp: objective(dataclasses.replace(inputs, logprobs=lp), config).total)(
        inputs.logprobs
    )


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("grpo", lambda inputs: grpo_loss(inputs, clip_epsilon=0.1, clip_epsilon_high=0.3)),
        ("gspo", lambda inputs: gspo_loss(inputs, clip_epsilon=0.1, clip_epsilon_high=0.3)),
        ("gspo-token", lambda inputs: gspo_token_loss(inputs, clip_epsilon=0.1, clip_epsilon_high=0.3)),
        ("cispo", lambda inputs: cispo_loss(inputs, clip_epsilon_high=0.3)),
        ("reinforce", reinforce_loss),
    ],
)
def test_a_name_stands_for_its_function(name, loss):
    config = GRPOConfig(loss=name, clip_epsilon=0.1, clip_epsilon_high=0.3)
    found, expected = objective(given(), config), loss(given())
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_upper_epsilon_is_the_lower_one_unless_it_is_given():
    for loss in ("grpo", "cispo"):
        one = objective(given(), GRPOConfig(loss=loss, clip_epsilon=0.1))
        other = objective(given(), GRPOConfig(loss=loss, clip_epsilon=0.1, clip_epsilon_high=0.1))
        assert one.total == other.total


def test_the_entropy_bonus_counts_with_the_weights():
    with_bonus = objective(given(), GRPOConfig(entropy_coefficient=0.25)).total
    # Four tokens of weight a half and 2 nats.
    np.testing.assert_allclose(objective(given(), GRPOConfig()).total - with_bonus, 0.25 * 4.0, rtol=1e-6)


def test_truncated_importance_sampling_splits_the_ratio_at_the_old_policy():
    inputs = dataclasses.replace(given(), old_logprobs=given().logprobs - jnp.log(1.1))
    value, slope = value_and_slope(GRPOConfig(tis_cap=2.0), inputs)
    # pi / pi_old is 1.1 everywhere, inside the clip; pi_old / pi_behaviour is a 1.1th of the ratios.
    weights = np.minimum([[0.5, 1.5], [2.0, 3.0]] / np.float64(1.1), 2.0)
    expected = np.zeros((2, 3))
    expected[:, :2] = -0.5 * weights * 1.1 * np.array([[1.0], [-1.0]])
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_on_the_first_pass_the_policy_is_its_own_old_one():
    value, slope = value_and_slope(GRPOConfig(tis_cap=2.0), given())
    output = objective(given(), GRPOConfig(tis_cap=2.0))
    expected = np.zeros((2, 3))
    expected[:, :2] = -0.5 * np.array([[0.5, 1.5], [-2.0, -2.0]])
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-6)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)
    assert output.num_clipped == 0
    np.testing.assert_allclose(output.ratio[:, :2], [[0.5, 1.5], [2.0, 3.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"sequence_ratio_max": 2.0}, [1, 0]),
        ({"sequence_ratio_min": 0.9}, [0, 1]),
        ({"sequence_ratio_min": 0.9, "sequence_negative_only": True}, [1, 1]),
        ({"sequence_ratio_max": 1.4, "sequence_ratio": "max"}, [0, 0]),
    ],
)
def test_sequences_outside_the_band_weigh_nothing_and_the_bonus_stays(change, kept):
    config = GRPOConfig(entropy_coefficient=0.25, **change)
    value, slope = value_and_slope(config, given())
    masked = dataclasses.replace(given(), loss_mask=given().loss_mask & (jnp.array(kept)[:, None] == 1))
    expected, expected_slope = value_and_slope(GRPOConfig(), masked)
    np.testing.assert_allclose(value, expected - 0.25 * 4.0, rtol=1e-6)
    np.testing.assert_array_equal(slope, expected_slope)


def test_both_corrections_multiply():
    config = GRPOConfig(tis_cap=1.2, sequence_ratio_max=2.0)
    _, slope = value_and_slope(config, given())
    np.testing.assert_allclose(slope, [[-0.25, -0.6, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6)
