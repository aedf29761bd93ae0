import jax.numpy as jnp
import numpy as np
import pytest

from train.advantages import ADVANTAGES, group_advantages, soft_overlong_punishment


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [
        (1, [-2.4748737342] + [0.3535533906] * 7),
        (0, [-2.6457513111] + [0.3779644730] * 7),
    ],
)
def test_one_bad_reward_among_equals_keeps_a_true_deviation(ddof, expected):
    """P40."""
    rewards = jnp.array([0.0] + [0.95] * 7)
    np.testing.assert_allclose(group_advantages(rewards, 8, ddof=ddof, epsilon=0.0), expected, rtol=1e-6)


@pytest.mark.parametrize("reward", [1.0, 0.1, 0.95, -3.7])
@pytest.mark.parametrize("group_size", [4, 7])
def test_equal_rewards_give_exactly_zero(reward, group_size):
    """P41."""
    advantages = group_advantages(jnp.full(group_size, reward), group_size, epsilon=1e-8)
    assert (np.asarray(advantages) == 0).all()


def test_statistics_are_those_of_the_group_not_of_the_batch():
    """P42."""
    advantages = group_advantages(jnp.array([0.0, 1.0, 10.0, 11.0]), 2, epsilon=0.0)
    np.testing.assert_allclose(advantages, [-0.7071067812, 0.7071067812] * 2, rtol=1e-6)


def test_shuffling_groups_permutes_the_result_only():
    """P42."""
    rewards = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    order = np.array([3, 0, 4, 1, 2])
    plain = np.asarray(group_advantages(jnp.asarray(rewards.reshape(-1)), 4)).reshape(5, 4)
    shuffled = np.asarray(group_advantages(jnp.asarray(rewards[order].reshape(-1)), 4)).reshape(5, 4)
    np.testing.assert_array_equal(shuffled, plain[order])


@pytest.mark.parametrize("group_size", [8, 32])
def test_no_advantage_exceeds_its_bound(group_size):
    """P40."""
    rewards = np.random.default_rng(1).choice([0.0, 0.95, 1.0], size=100 * group_size).astype(np.float32)
    advantages = group_advantages(jnp.asarray(rewards), group_size, ddof=0)
    assert np.abs(advantages).max() <= np.sqrt(group_size - 1) * (1 + 1e-6)


@pytest.mark.parametrize(("rows", "group_size"), [(6, 4), (4, 1)])
def test_groups_that_do_not_fit_are_refused(rows, group_size):
    with pytest.raises(
        ValueError, match=f"group_size must divide the {rows} rewards and exceed ddof=1, got {group_size}"
    ):
        group_advantages(jnp.zeros(rows), group_size)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [1.0, 0.1, 0.95, -3.7])
@pytest.mark.parametrize("group_size", [4, 7])
def test_equal_rewards_give_exactly_zero_in_every_formula(name, reward, group_size):
    rewards = np.full(3 * group_size, reward, np.float32)
    assert (np.asarray(ADVANTAGES[name](jnp.asarray(rewards), group_size)) == 0).all()
    # Beside a group that is not flat, too.
    rewards[0] += 1
    advantages = np.asarray(ADVANTAGES[name](jnp.asarray(rewards), group_size))
    assert (advantages[group_size:] == 0).all()
    assert (advantages[:group_size] != 0).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Means 1 and 4; deviations sqrt(2) and 2 sqrt(2); over the batch sqrt((1 + 1 + 4 + 4) / 3).
        ("grpo", [-0.7071067812, 0.7071067812, -0.7071067812, 0.7071067812]),
        ("dr-grpo", [-1.0, 1.0, -2.0, 2.0]),
        ("rloo", [-2.0, 2.0, -4.0, 4.0]),
        ("reinforce++-baseline", [-0.5477225575, 0.5477225575, -1.0954451150, 1.0954451150]),
    ],
)
def test_hand_computed(name, expected):
    rewards = jnp.array([0.0, 2.0, 2.0, 6.0])
    np.testing.assert_allclose(ADVANTAGES[name](rewards, 2), expected, rtol=3e-6)


def oracle(name, groups):
    mean = groups.mean(axis=1, keepdims=True)
    if name == "grpo":
        return (groups - mean) / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    if name == "rloo":
        total = groups.sum(axis=1, keepdims=True)
        return groups - (total - groups) / (groups.shape[1] - 1)
    centred = groups - mean
    # The paper's batch mean is subtracted here: it is 0 but for rounding.
    return centred if name == "dr-grpo" else (centred - centred.mean()) / (centred.std(ddof=1) + 1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("group_size", [2, 5, 16])
def test_every_formula_against_float64(name, group_size):
    rewards = np.random.default_rng(group_size).normal(size=(6, group_size)).astype(np.float32)
    found = ADVANTAGES[name](jnp.asarray(rewards.reshape(-1)), group_size)
    expected = oracle(name, rewards.astype(np.float64)).reshape(-1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_one_bad_reward_among_equals_makes_nothing_out_of_rounding(name):
    """P40."""
    rewards = np.array([0.0] + [0.95] * 7, np.float32)
    found = ADVANTAGES[name](jnp.asarray(rewards), 8)
    np.testing.assert_allclose(found, oracle(name, rewards[None].astype(np.float64))[0], rtol=3e-6)
    assert np.abs(found).max() <= 2.6458


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_that_do_not_fit_any_formula_are_refused(name):
    with pytest.raises(ValueError, match="group_size must divide the 6 rewards and exceed ddof=1, got 4"):
        ADVANTAGES[name](jnp.zeros(6), 4)


def test_the_soft_punishment_of_long_completions():
    lengths = jnp.array([0, 12, 13, 14, 15, 16, 17], jnp.int32)
    found = soft_overlong_punishment(lengths, max_length=16, buffer=4)
    np.testing.assert_array_equal(found, [0, 0, -0.25, -0.5, -0.75, -1, -1])


@pytest.mark.parametrize("buffer", [0, 17])
def test_a_buffer_out_of_range_is_named(buffer):
    with pytest.raises(ValueError, match=rf"buffer must be in \[1, max_length=16\], got {buffer}"):
        soft_overlong_punishment(jnp.zeros(2, jnp.int32), max_length=16, buffer=buffer)
