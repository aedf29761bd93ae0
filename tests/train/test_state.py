import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import CONFIG, make_model

from train.state import TrainState, apply_gradients, averaged, init_state, learning_rates, make_optimizer


def step_sizes(config, num_iterations):
    """How far a lone weight under a constant gradient moves at each update: Adam's step is the learning rate."""
    optimizer = make_optimizer(config, num_iterations)
    weight = jnp.float32(0.0)
    state = optimizer.init(weight)
    sizes = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(num_iterations):
            updates, state = optimizer.update(jnp.float32(0.5), state, weight)
            sizes.append(-float(updates))
    return np.array(sizes)


def test_a_constant_schedule_is_constant():
    np.testing.assert_allclose(step_sizes(CONFIG, 5), CONFIG.learning_rate, rtol=1e-4)


def test_a_cosine_schedule_rises_then_falls_to_a_twentieth():
    config = dataclasses.replace(CONFIG, schedule="cosine", warmup_iterations=4)
    sizes = step_sizes(config, 20) / CONFIG.learning_rate
    np.testing.assert_allclose(sizes[:5], [0, 0.25, 0.5, 0.75, 1], atol=1e-4)
    place = np.arange(16) / 16
    np.testing.assert_allclose(sizes[4:], 0.05 + 0.95 * (1 + np.cos(np.pi * place)) / 2, rtol=1e-3)


def test_a_linear_schedule_falls_to_a_twentieth():
    config = dataclasses.replace(CONFIG, schedule="linear", warmup_iterations=2)
    sizes = step_sizes(config, 12) / CONFIG.learning_rate
    np.testing.assert_allclose(sizes[2:], 1 - 0.95 * np.arange(10) / 10, rtol=1e-3)
    with jax.numpy_dtype_promotion("standard"):
        rates = [float(learning_rates(config, 12)(step)) for step in range(12)]
    np.testing.assert_allclose(sizes, np.array(rates) / CONFIG.learning_rate, rtol=1e-3, atol=1e-6)


def test_the_decay_of_weights_is_that_of_adamw():
    """A weight of 2 under no gradient loses learning_rate * weight_decay of itself."""
    optimizer = make_optimizer(dataclasses.replace(CONFIG, weight_decay=0.1), 5)
    weight = jnp.float32(2.0)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(jnp.float32(0.0), optimizer.init(weight), weight)
    np.testing.assert_allclose(updates, -2.0 * 0.1 * CONFIG.learning_rate, rtol=1e-5)


def test_small_updates_move_a_master_weight():
    """FAULTS P53: 1000 steps of 1e-6 move a float32 weight of 1, a bfloat16 one never."""
    optimizer = make_optimizer(dataclasses.replace(CONFIG, learning_rate=1e-6), 1000)
    weight = jnp.float32(1.0)

    def step(carry, _):
        weight, state = carry
        updates, state = optimizer.update(jnp.float32(0.5), state, weight)
        return (optax.apply_updates(weight, updates), state), None

    with jax.numpy_dtype_promotion("standard"):
        (moved, _), _ = jax.lax.scan(step, (weight, optimizer.init(weight)), None, length=1000)
    np.testing.assert_allclose(1 - float(moved), 1.0133e-3, rtol=0.02)


def test_an_average_follows_the_weights():
    average, weights = jnp.float32(1.0), [2.0, 0.0, 4.0]
    for weight in weights:
        average = averaged(average, jnp.float32(weight), 0.75)
    assert float(average) == 0.75 * (0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 0) + 0.25 * 4


def test_a_state_has_what_the_config_asks_for_in_arrays_of_its_own():
    config = dataclasses.replace(CONFIG, kl_coefficient=0.1, reference_every=2, ema_decay=0.9)
    state = init_state(make_model(), make_optimizer(config, 10), 0, config)
    for copy in (state.reference, state.average):
        for one, other in zip(jax.tree.leaves(copy), jax.tree.leaves(state.model), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one is not other
    assert state.averaged_model is not state.model
    plain = init_state(make_model(), make_optimizer(CONFIG, 10), 0, CONFIG)
    assert plain.reference is plain.average is None
    assert plain.averaged_model is plain.model


def test_one_update_is_optax_on_clipped_gradients():
    model = make_model()
    gradients = jax.tree.map(lambda leaf: 100 * jnp.ones_like(leaf), model)
    optimizer = make_optimizer(CONFIG, 10)
    state = TrainState(model, optimizer.init(model), jnp.int32(0), jax.random.key(0))
    moved, _ = jax.jit(lambda state, gradients: apply_gradients(state, gradients, optimizer))(state, gradients)
    norm = float(optax.tree.norm(gradients))
    # Adam's first step is -lr g / (|g| + eps), with g already scaled to the allowed norm.
    g = 100 * CONFIG.max_grad_norm / norm
    for before, after in zip(jax.tree.leaves(model), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(after - before, -CONFIG.learning_rate * g / (g + 1e-8), rtol=1e-3)


@pytest.mark.parametrize("num_updates", [1, 3])
def test_the_schedule_counts_iterations_not_passes(num_updates):
    config = dataclasses.replace(CONFIG, schedule="cosine", num_updates=num_updates)
    optimizer = make_optimizer(config, 10)
    weight = jnp.float32(0.0)
    state = optimizer.init(weight)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(10 * num_updates):
            updates, state = optimizer.update(jnp.float32(1.0), state, weight)
    assert 0.05 <= -float(updates) / CONFIG.learning_rate < 0.1
