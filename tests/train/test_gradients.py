"""Reference policy, regularisers, stale tokens, wide supports and meshes, in whole updates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import CONFIG, OPTIMIZER, TASK, make_model, rollout_of

from jaxmask import Reference, SamplingBatch, SamplingParams, full_scores, generate, support_scores
from train.gradients import Learner, accumulate, hidden_states
from train.rows import learner_rows
from train.state import init_state
from train.step import update_from_host
from train.tasks import Rewards

pytestmark = pytest.mark.unoptimized
# Those that ask for equal bits.
OPTIMIZED = pytest.mark.optimized

REWARDS = Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
ADVANTAGES = jnp.asarray(np.linspace(-1, 1, 16), jnp.float32)


@functools.cache
def rollout():
    return rollout_of(init_state(make_model(), OPTIMIZER, 0))


@functools.cache
def wide_rollout():
    """Every edit; supports of up to 8 ids in cells for 3."""
    edits = [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"logit_bias": {2: 3.0}}]
    edits += [{"min_tokens": 2, "stop_token_ids": [4]}, {"bad_words": [[3], [1, 2]], "allowed_token_ids": [1, 2, 3, 5]}]
    params = [SamplingParams(top_k=8, max_tokens=3, seed=row, **edits[row % 5]) for row in range(16)]
    batch = SamplingBatch.from_params(params, vocab_size=TASK.vocab_size, support_bound=8)
    prompts = TASK.prompts(jax.random.key(5), CONFIG.num_prompts)
    prompts = [jnp.asarray(leaf) for leaf in (prompts.token_ids, prompts.lengths)]
    drawn = generate(make_model(), batch, *prompts, max_new_tokens=3, width=3, group_size=4)
    assert drawn.support.packed is not None
    assert (np.asarray(drawn.support.counts) > 3).any()
    assert (np.asarray(drawn.support.counts) <= 3).any()
    return drawn


def update(config, rollout, **options):
    state = init_state(make_model(), OPTIMIZER, 0)
    return update_from_host(state, rollout, REWARDS, config=config, optimizer=OPTIMIZER, **options)


run = jax.jit(accumulate, static_argnums=2)
make_rows = jax.jit(learner_rows)


@functools.cache
def wide_rows():
    return make_rows(wide_rollout(), ADVANTAGES)


@functools.cache
def wide_pass():
    return run(make_model(), wide_rows(), Learner(CONFIG))


def with_reference(config, reference, model, rows):
    """`accumulate` as a function of the arrays alone."""
    return jax.jit(lambda model, rows, reference: accumulate(model, rows, Learner(config, reference)))(
        model, rows, reference
    )


def assert_same(one, other, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.abs(b).max() + 1))


@pytest.mark.slow
def test_wide_supports_with_every_edit_are_on_policy_in_any_cut():
    whole, seen = wide_pass()
    config = dataclasses.replace(CONFIG, num_micro_batches=4)
    parts, seen_parts = run(make_model(), wide_rows(), Learner(config))
    for passed in (seen, seen_parts):
        np.testing.assert_allclose(passed.ratio, 1, atol=1e-5)
        assert passed.clip_fraction == 0
    assert_same(parts, whole)
    assert float(seen.loss) == pytest.approx(float(seen_parts.loss), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4), (8, 1)])
def test_updates_on_several_devices_are_those_of_one(sizes):
    """P52 on a mesh, every edit on, and the gradient: rows and vocabulary cut, 16 rows of 3 tokens and 16 ids."""
    mesh = jax.make_mesh(sizes, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    cut = NamedSharding(mesh, P("data", "tensor"))
    one, seen = wide_pass()
    many, seen_there = run(make_model(), wide_rows(), Learner(CONFIG, sharding=cut))
    assert_same(many, one)
    np.testing.assert_allclose(seen_there.ratio, 1, atol=1e-5)
    np.testing.assert_allclose(seen_there.entropy, seen.entropy, atol=1e-5)


@functools.partial(jax.jit, static_argnames="over")
def scores_by_hand(model, reference, rows, over):
    temperature = jnp.broadcast_to(rows.temperature[:, None], rows.sampled_ids.shape)
    ref = Reference(hidden_states(reference, rows), reference.head)
    options = {"temperature": temperature, "reference": ref}
    if over == "support":
        return support_scores(hidden_states(model, rows), model.head, rows.support, rows.sampled_ids, **options)
    return full_scores(hidden_states(model, rows), model.head, rows.sampled_ids, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("over", "estimator"), [("support", "exact"), ("vocabulary", "k3")])
def test_the_loss_has_the_price_of_the_kl_and_the_bonus_of_the_entropy(over, estimator):
    changes = {"kl_coefficient": 0.3, "kl_estimator": estimator, "entropy_coefficient": 0.2, "regularize_over": over}
    config = dataclasses.replace(CONFIG, **changes)
    model, reference = make_model(), make_model(seed=1)
    rows = make_rows(rollout(), ADVANTAGES)
    plain, _ = run(model, rows, Learner(CONFIG))
    found, seen = with_reference(config, reference, model, rows)

    def extra(model):
        scores = scores_by_hand(model, reference, rows, over)
        kl = scores.kl
        if estimator == "k3":
            on_support = scores_by_hand(model, reference, rows, "support")
            d = on_support.ref_logprobs - on_support.logprobs
            kl = jnp.exp(d) - 1 - d
        return (0.3 * kl - 0.2 * scores.entropy).mean()

    assert_same(jax.tree.map(jnp.subtract, found, plain), jax.jit(jax.grad(extra))(model))
    np.testing.assert_allclose(seen.kl, scores_by_hand(model, reference, rows, over).kl, atol=1e-5)


def test_without_a_learning_signal_only_the_kl_moves_the_policy():
    """P41: equal rewards move nothing; with a price on the KL, it alone does. P52: at the reference it is 0."""
    config = dataclasses.replace(CONFIG, kl_coefficient=0.5)
    rows = make_rows(rollout(), jnp.zeros(16))
    still, seen = with_reference(config, make_model(), make_model(), rows)
    assert float(jnp.abs(seen.kl).max()) == 0
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(still)) <= 1e-6
    moved, seen = with_reference(config, make_model(seed=1), make_model(), rows)
    assert float(seen.kl.min()) >= -1e-6
    assert float(seen.kl.max()) > 1e-3
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(moved)) > 1e-3


def test_a_price_on_the_kl_needs_a_reference():
    with pytest.raises(ValueError, match=r"kl_coefficient 0\.5 needs a reference policy, got none"):
        update(dataclasses.replace(CONFIG, kl_coefficient=0.5), rollout())


@OPTIMIZED
def test_tokens_that_are_too_old_are_left_out():
    """Versions 0, 1 and 2 seen from iteration 2: with max_staleness 1, the first token of each row goes."""
    assert rollout().policy_versions.tolist() == [[0] * 3] * 16
    versions = jnp.tile(jnp.arange(3, dtype=jnp.int32), (16, 1))
    old = dataclasses.replace(rollout(), policy_versions=versions)
    config = dataclasses.replace(CONFIG, max_staleness=1)

    def at_two(config, rollout):
        state = dataclasses.replace(init_state(make_model(), OPTIMIZER, 0), step=jnp.int32(2))
        return update_from_host(state, rollout, REWARDS, config=config, optimizer=OPTIMIZER)

    state, metrics = at_two(config, old)
    assert metrics.staleness == 1
    by_hand = dataclasses.replace(old, sampled_mask=jnp.broadcast_to(versions >= 1, versions.shape))
    expected, _ = at_two(CONFIG, by_hand)
    for one, other in zip(jax.tree.leaves(state.model), jax.tree.leaves(expected.model), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"max_staleness 1 needs Rollout\.policy_versions"):
        at_two(config, dataclasses.replace(old, policy_versions=None))


def test_a_rollout_longer_than_the_constant_length_is_refused():
    config = dataclasses.replace(CONFIG, aggregation="constant-length", max_new_tokens=2)
    with pytest.raises(ValueError, match="max_new_tokens must be at least the 3 tokens of the rollout"):
        update(config, rollout())


def test_only_tokens_that_train_are_counted():
    kept = dataclasses.replace(rollout(), sampled_mask=jnp.ones((16, 3), bool).at[0].set(False))
    _, metrics = update(CONFIG, kept)
    assert metrics.num_tokens == 45
    assert metrics.completion_length == 3
