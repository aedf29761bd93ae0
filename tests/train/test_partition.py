"""Training adapters alone: gradients, optimiser, updates, checkpoints."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIG, OPTIMIZER, TASK, make_model, rollout_of

import models
from models import LoraConfig, MeshRules, lora, make_mesh
from models.weights import from_named, named_parameters
from train import checkpoint
from train.aggregation import aggregation
from train.gradients import Learner, _loss, accumulate
from train.partition import combine, partition
from train.progress import RunState
from train.rows import learner_rows
from train.state import init_state
from train.step import train_iteration, update_from_host
from train.tasks import Rewards

LORA = LoraConfig(2, 4.0, ("query", "down"))
ADVANTAGES = jnp.asarray(np.linspace(-1, 1, 16), jnp.float32)
REWARDS = Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
KL = dataclasses.replace(CONFIG, kl_coefficient=0.3)


@functools.cache
def base_model() -> models.Decoder:
    return make_model()


@functools.cache
def adapted() -> models.Decoder:
    """Adapters as in the middle of training: B is not zero."""
    model = lora.attach(base_model(), LORA, nnx.Rngs(1))
    rng = np.random.default_rng(0)
    arrays = named_parameters(model)
    new = {
        name: jnp.asarray(0.2 * rng.standard_normal(leaf.shape), jnp.float32)
        for name, leaf in arrays.items()
        if lora.is_adapter(name)
    }
    return from_named(model.config, arrays | new)


@functools.cache
def rollout():
    """Of the base, whose programs other tests compile too."""
    return rollout_of(init_state(base_model(), OPTIMIZER, 0))


@functools.cache
def rows():
    return jax.jit(learner_rows)(rollout(), ADVANTAGES)


@jax.jit
def gradients(model, rows):
    """Of adapters, as training computes it, and of every array; one program, so that both share a forward pass."""
    learner = Learner(CONFIG)
    whole = aggregation(rows.loss_mask, CONFIG.aggregation, max_length=CONFIG.max_new_tokens)
    everything = jax.grad(lambda model: _loss(model, rows, whole, learner)[0])(model)
    return *accumulate(model, rows, learner), everything


@functools.cache
def gradients_on_one_device():
    return gradients(adapted(), rows())


def fresh_state(model=None, optimizer=OPTIMIZER):
    """A state of its own: iterations donate theirs."""
    return jax.tree.map(jnp.copy, init_state(adapted() if model is None else model, optimizer, 3))


def base_bits(model):
    # Of copies: what NumPy looks at cannot be donated.
    return [np.asarray(jnp.copy(leaf)) for name, leaf in named_parameters(model).items() if not lora.is_adapter(name)]


def matmul_shapes(jaxpr):
    """Shapes of all matrix products of a program, loops and inner functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.shape
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from matmul_shapes(inner)


def test_adapters_are_trained_and_the_rest_is_frozen():
    trained, frozen = partition(adapted())
    assert sorted(named_parameters(trained)) == [
        f"layers.0.{target}_lora_{side}" for target in ("down", "query") for side in "ab"
    ]
    assert named_parameters(trained).keys() | named_parameters(frozen).keys() == named_parameters(adapted()).keys()
    again = combine(trained, frozen)
    assert jax.tree.structure(again) == jax.tree.structure(adapted())
    assert all(one is other for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(adapted()), strict=True))


def test_without_adapters_all_is_trained_and_the_tree_is_the_decoders():
    trained, frozen = partition(base_model())
    assert jax.tree.structure(trained) == jax.tree.structure(base_model())
    assert jax.tree.leaves(frozen) == []


def test_the_gradient_is_the_whole_one_where_adapters_are():
    found, _, everything = gradients_on_one_device()
    expected = named_parameters(everything)
    assert len(named_parameters(found)) == 4
    for name, leaf in named_parameters(found).items():
        assert float(jnp.abs(leaf).max()) > 1e-4
        np.testing.assert_allclose(leaf, expected[name], atol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_no_gradient_and_no_moment_of_a_frozen_weight_is_made():
    # 12 rows in parts of 6: no activation has the shape of a weight.
    config = dataclasses.replace(KL, num_prompts=3, num_updates=2, num_micro_batches=2)
    shapes = {leaf.shape for leaf in base_bits(adapted()) if leaf.ndim == 2}

    def made(model):
        state = init_state(model, OPTIMIZER, 0)
        reference = base_model() if model.config.lora is None else None
        options = {"task": TASK, "config": config, "optimizer": OPTIMIZER, "reference": reference}
        traced = train_iteration.trace(state, **options)
        return shapes & {tuple(sorted(shape, reverse=True)) for shape in matmul_shapes(traced.jaxpr.jaxpr)}

    shapes |= {tuple(sorted(shape, reverse=True)) for shape in shapes}
    assert {(24, 16), (16, 16), (16, 8)} <= made(base_model()), "the walk must find the gradients that are made"
    assert not made(adapted())
    moments = jax.tree.leaves(init_state(adapted(), OPTIMIZER, 0).opt_state)
    adapters = sorted(leaf.shape for leaf in jax.tree.leaves(partition(adapted())[0]))
    assert sorted(leaf.shape for leaf in moments if leaf.ndim) == sorted(adapters * 2)


def test_an_iteration_moves_adapters_alone_from_a_ratio_of_one():
    state = fresh_state(lora.attach(base_model(), LORA, nnx.Rngs(1)))
    before, structure = base_bits(state.model), jax.tree.structure(state)
    for _ in range(3):
        given = state
        state, metrics = train_iteration(state, task=TASK, config=KL, optimizer=OPTIMIZER)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.model))
        assert metrics.max_ratio_error <= 1e-5
        assert float(metrics.grad_norm) > 0
    assert jax.tree.structure(state) == structure
    for one, other in zip(before, base_bits(state.model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(jnp.abs(state.model.layers[0].down_lora_b[...]).max()) > 1e-3


@pytest.mark.slow
def test_the_reference_of_adapters_is_the_base_and_the_cut_changes_nothing():
    def update(config, reference=None):
        options = {"config": config, "optimizer": OPTIMIZER, "reference": reference}
        return update_from_host(fresh_state(), rollout(), REWARDS, **options)

    found, seen = update(KL)
    expected, metrics = update(dataclasses.replace(KL, num_micro_batches=4), base_model())
    assert float(metrics.kl) > 1e-3
    assert float(seen.kl) == pytest.approx(float(metrics.kl), abs=1e-6)
    assert float(seen.grad_norm) == pytest.approx(float(metrics.grad_norm), rel=1e-5)
    for a, b in zip(jax.tree.leaves(found.model), jax.tree.leaves(expected.model), strict=True):
        np.testing.assert_allclose(a, b, atol=CONFIG.learning_rate / 100)


@pytest.mark.slow
def test_adapters_over_a_bfloat16_base_take_float32_steps():
    arrays = named_parameters(adapted())
    half = {name: leaf if lora.is_adapter(name) else leaf.astype(jnp.bfloat16) for name, leaf in arrays.items()}
    state = fresh_state(from_named(adapted().config, half))
    before = base_bits(state.model)
    state, metrics = update_from_host(state, rollout(), REWARDS, config=CONFIG, optimizer=OPTIMIZER)
    assert np.isfinite(float(metrics.loss))
    for one, other in zip(before, base_bits(state.model), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(one, other)
    for name, leaf in named_parameters(partition(state.model)[0]).items():
        assert leaf.dtype == jnp.float32
        assert float(jnp.abs(leaf - arrays[name]).max()) > 1e-4


@pytest.mark.usefixtures("unchecked")
def test_adapters_that_are_trained_must_be_float32():
    with pytest.raises(ValueError, match="must be float32, got bfloat16"):
        init_state(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), adapted()), OPTIMIZER, 0)


@pytest.mark.slow
def test_a_step_on_eight_devices_is_that_of_one():
    found, seen, _ = gradients(models.shard(adapted(), MeshRules(make_mesh(data=2, fsdp=2, tensor=2))), rows())
    expected, alone, _ = gradients_on_one_device()
    np.testing.assert_allclose(seen.ratio, alone.ratio, atol=1e-5)
    np.testing.assert_allclose(seen.loss, alone.loss, atol=1e-6)
    for (name, one), other in zip(named_parameters(found).items(), named_parameters(expected).values(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, err_msg=name)


def test_a_checkpoint_holds_adapters_and_knows_its_base(tmp_path):
    state = fresh_state()
    checkpoint.save(tmp_path, 1, RunState(state))
    names = checkpoint.named_leaves(RunState(state))
    assert sum(name.startswith(".model") for name in names) == 4
    assert ".model.layers[0].down_lora_a.value" in names
    other = dataclasses.replace(fresh_state(lora.attach(base_model(), LORA, nnx.Rngs(9))), step=jnp.int32(5))
    restored = checkpoint.restore(tmp_path, 1, RunState(other)).train
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for one, two in zip(jax.tree.leaves(restored.model), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(one, two)
    assert restored.step == 0
    stranger = fresh_state(lora.attach(make_model(seed=1), LORA, nnx.Rngs(1)))
    with pytest.raises(ValueError, match="does not fit this run: its frozen weights are others"):
        checkpoint.restore(tmp_path, 1, RunState(stranger))
    wider = fresh_state(lora.attach(base_model(), LoraConfig(3, 1.0, LORA.targets), nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"array \.model.*_lora_a.* has shape"):
        checkpoint.restore(tmp_path, 1, RunState(wider))
