import jax.numpy as jnp
import numpy as np
import pytest

from train.advantages import group_advantages


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [
        (1, [-2.4748737342] + [0.3535533906] * 7),
        (0, [-2.6457513111] + [0.3779644730] * 7),
    ],
)
def test_one_bad_reward_among_equals_keeps_a_true_deviation(ddof, expected):
    rewards = jnp.array([0.0] + [0.95] * 7)
    np.testing.assert_allclose(group_advantages(rewards, 8, ddof=ddof, epsilon=0.0), expected, rtol=1e-6)


@pytest.mark.parametrize("reward", [1.0, 0.1, 0.95, -3.7])
@pytest.mark.parametrize("group_size", [4, 7])
def test_equal_rewards_give_exactly_zero(reward, group_size):
    advantages = group_advantages(jnp.full(group_size, reward), group_size, epsilon=1e-8)
    assert (np.asarray(advantages) == 0).all()


def test_statistics_are_those_of_the_group_not_of_the_batch():
    advantages = group_advantages(jnp.array([0.0, 1.0, 10.0, 11.0]), 2, epsilon=0.0)
    np.testing.assert_allclose(advantages, [-0.7071067812, 0.7071067812] * 2, rtol=1e-6)


def test_shuffling_groups_permutes_the_result_only():
    rewards = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    order = np.array([3, 0, 4, 1, 2])
    plain = np.asarray(group_advantages(jnp.asarray(rewards.reshape(-1)), 4)).reshape(5, 4)
    shuffled = np.asarray(group_advantages(jnp.asarray(rewards[order].reshape(-1)), 4)).reshape(5, 4)
    np.testing.assert_array_equal(shuffled, plain[order])


@pytest.mark.parametrize("group_size", [8, 32])
def test_no_advantage_exceeds_its_bound(group_size):
    rewards = np.random.default_rng(1).choice([0.0, 0.95, 1.0], size=100 * group_size).astype(np.float32)
    advantages = group_advantages(jnp.asarray(rewards), group_size, ddof=0)
    assert np.abs(advantages).max() <= np.sqrt(group_size - 1) * (1 + 1e-6)


@pytest.mark.parametrize(("rows", "group_size"), [(6, 4), (4, 1)])
def test_groups_that_do_not_fit_are_refused(rows, group_size):
    with pytest.raises(
        ValueError, match=f"group_size must divide the {rows} rewards and exceed ddof=1, got {group_size}"
    ):
        group_advantages(jnp.zeros(rows), group_size)
