import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import CONFIG, make_model

from train.state import TrainState, apply_gradients, make_optimizer


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
