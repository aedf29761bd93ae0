"""The learner on meshes of 2, 4 and 8 devices: the losses and weights of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import models
from train.gradients import Learner, accumulate
from train.metrics import NAMES
from train.rows import learner_rows
from train.state import init_state
from train.step import train_iteration

MESHES = ({"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
# Sums over rows, heads and vocabulary are cut and added up in another order.
REORDER_TOLERANCE = 1e-5
CONFIG = dataclasses.replace(tiny.CONFIG, num_micro_batches=2)


@pytest.fixture(scope="module")
def model():
    """Two layers, a head padded to 16 ids so that it can be cut, a soft-cap, gated norms: what changes the learner."""
    shape = dataclasses.replace(
        tiny.make_model().config,
        vocab_size=16,
        num_kv_heads=2,
        fixed_order=False,
        logit_softcap=5.0,
        norm_plus_one=True,
    )
    model = models.Decoder(shape, rngs=nnx.Rngs(0))
    return jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim == 2 else leaf, model)


def on_mesh(model, sizes):
    return models.shard(model, models.MeshRules(models.make_mesh(**sizes)))


def test_losses_and_gradients_are_the_same_on_every_mesh(model):
    rollout = tiny.rollout_of(init_state(model, tiny.OPTIMIZER, 0), CONFIG)
    rows = learner_rows(rollout, jnp.asarray(np.linspace(-1.0, 1.0, CONFIG.num_rows), jnp.float32))
    learner = Learner(CONFIG)
    run = jax.jit(lambda model, rows: accumulate(model, rows, learner))
    gradients, done = run(model, rows)
    # The same weights that sampled: the soft-cap is part of the policy.
    np.testing.assert_allclose(done.ratio[rows.loss_mask], 1.0, rtol=0, atol=REORDER_TOLERANCE)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))
    for sizes in MESHES[:2]:
        found, found_done = run(on_mesh(model, sizes), rows)
        np.testing.assert_allclose(found_done.loss, done.loss, rtol=0, atol=REORDER_TOLERANCE, err_msg=str(sizes))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=REORDER_TOLERANCE * largest, err_msg=str(sizes))


@pytest.mark.slow
def test_iterations_on_eight_devices_are_those_of_one(model):
    """Whole iterations in one program that compiles once: rollouts, losses and weights."""
    # The state is donated.
    placed = on_mesh(model, MESHES[-1])
    states = [init_state(one, tiny.OPTIMIZER, 0) for one in (jax.tree.map(jnp.copy, model), placed)]
    options = {"task": tiny.TASK, "config": CONFIG, "optimizer": tiny.OPTIMIZER}
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    for iteration in range(3):
        before = len(compiled)
        states, metrics = zip(*(train_iteration(state, **options) for state in states), strict=True)
        assert iteration == 0 or len(compiled) == before
        for field in NAMES:
            alone, found = (getattr(one, field) for one in metrics)
            if alone is not None:
                np.testing.assert_allclose(found, alone, rtol=1e-4, atol=REORDER_TOLERANCE, err_msg=field)
    for one, other in zip(*(jax.tree.leaves(state.model) for state in states), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=REORDER_TOLERANCE)
    embedding = states[1].model.embedding[...]
    assert embedding.sharding.shard_shape(embedding.shape) == (8, 8)
