import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, OPTIMIZER, TASK, make_model, rollout_of

from jaxmask import SamplingBatch, SamplingParams, generate, masked_log_probs
from train.gradients import Learner, accumulate, logprobs
from train.presets import ALGORITHMS, as_published
from train.rows import _join, learner_rows
from train.state import apply_gradients, init_state, make_optimizer
from train.step import (
    _advantages,
    collect_for_host,
    grpo_step,
    train_iteration,
    update_from_host,
)
from train.tasks import Rewards

# What would move data between device and host, or call Python, inside a program.
HOST_PRIMITIVES = re.compile(r"callback|infeed|outfeed|host|device_put|debug")
HOST_OPERATIONS = re.compile(
    r"outfeed|infeed|custom_call_target=\"[^\"]*(callback|host|Host|python)|S\(5\)| send\(| recv\("
)


# One jitted form of each for all tests: op by op, every operation would be a program of its own.
GRADIENTS = jax.jit(accumulate, static_argnums=2)
LOGPROBS = jax.jit(logprobs, static_argnums=2)
ROWS = jax.jit(learner_rows)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def updated(state, rollout, rewards, config=CONFIG, optimizer=OPTIMIZER):
    """One `grpo_step` as one program, which all tests of a config share; the state stays, for others to start from."""
    return update_from_host(jax.tree.map(jnp.copy, state), rollout, rewards, config=config, optimizer=optimizer)


@pytest.mark.usefixtures("unchecked")
def test_an_iteration_is_one_program_without_the_host(state):
    traced = train_iteration.trace(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    names = set(primitives(traced.jaxpr.jaxpr))
    assert {"while", "dot_general", "scan"} <= names, "the walk must reach the bodies of loops"
    assert not [name for name in names if HOST_PRIMITIVES.search(name)]
    assert not HOST_OPERATIONS.search(traced.lower().compile().as_text())


def test_the_search_for_host_traffic_finds_it():
    def talks(x):
        jax.debug.callback(lambda y: None, x)
        return jax.lax.while_loop(lambda y: y < 3, lambda y: jax.pure_callback(lambda z: z + 1, y, y), x)

    traced = jax.jit(talks).trace(jnp.int32(0))
    assert sum(bool(HOST_PRIMITIVES.search(name)) for name in primitives(traced.jaxpr.jaxpr)) == 2
    assert HOST_OPERATIONS.search(traced.lower().compile().as_text())


@pytest.mark.slow
def test_an_iteration_passes_a_transfer_guard(state):
    state, _ = train_iteration(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    with jax.transfer_guard("disallow"):
        state, metrics = train_iteration(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    assert int(state.step) == 2
    assert np.isfinite(float(metrics.loss))


def test_the_state_is_donated(state):
    train_iteration(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.model))


def test_iterations_compile_once(state):
    for _ in range(3):
        state, _ = train_iteration(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    before = train_iteration._cache_size()
    for _ in range(3):
        state, _ = train_iteration(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    assert train_iteration._cache_size() == before


def test_the_ratio_is_one_on_the_first_pass_of_every_iteration(state):
    for _ in range(8):
        state, metrics = train_iteration(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
        assert metrics.max_ratio_error <= 1e-5
        assert metrics.clip_fraction == 0


@pytest.mark.slow
def test_full_vocabulary_scoring_is_biased_where_supports_are_not(state):
    config = dataclasses.replace(CONFIG, sampling_mask=False)
    rollout = rollout_of(state)
    rewards = Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
    _, off = updated(state, rollout, rewards, config)
    _, on = updated(state, rollout, rewards)
    assert abs(float(on.ratio_mean) - 1) <= 1e-6
    # Full probabilities are the kept ones times the kept mass, which truncation made smaller than 1.
    assert float(off.ratio_mean) < 0.95
    assert float(off.ratio_std) > 0.01


@pytest.mark.slow
def test_recorded_logprobs_are_the_models_on_the_recorded_supports(state):
    rollout = rollout_of(state)
    rows = ROWS(rollout, jnp.zeros(16))
    logits = jax.jit(lambda model, ids: model.logits(ids))(state.model, rows.token_ids)
    first = int(rollout.prompt_lengths[0]) - 1
    logits = logits[:, first : first + CONFIG.max_new_tokens]
    expected = masked_log_probs(logits, rollout.support, rollout.token_ids)
    np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-5)


@pytest.mark.slow
def test_micro_batches_do_not_change_the_gradient(state):
    rollout = rollout_of(state)
    # Unequal lengths, so that means of means would differ from the mean.
    rollout = dataclasses.replace(rollout, lengths=jnp.asarray(np.arange(16) % 3 + 1, jnp.int32))
    rows = ROWS(rollout, jnp.asarray(np.linspace(-1, 1, 16), jnp.float32))
    whole, seen = GRADIENTS(state.model, rows, Learner(CONFIG))
    cut = Learner(dataclasses.replace(CONFIG, num_micro_batches=4))
    parts, seen_parts = GRADIENTS(state.model, rows, cut)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * float(jnp.abs(one).max() + 1))
    np.testing.assert_allclose(seen.loss, seen_parts.loss, atol=1e-6)


def test_what_lies_in_cells_that_were_not_sampled_changes_nothing(state):
    rollout = dataclasses.replace(rollout_of(state), lengths=jnp.asarray(np.arange(16) % 3 + 1, jnp.int32))
    mask = rollout.loss_mask
    dirty = dataclasses.replace(
        rollout,
        token_ids=jnp.where(mask, rollout.token_ids, 9),
        logprobs=jnp.where(mask, rollout.logprobs, jnp.nan),
        support=dataclasses.replace(
            rollout.support,
            token_ids=jnp.where(mask[:, :, None], rollout.support.token_ids, 2),
            counts=jnp.where(mask, rollout.support.counts, 99),
        ),
    )
    advantages = jnp.asarray(np.linspace(-1, 1, 16), jnp.float32)
    clean, _ = GRADIENTS(state.model, ROWS(rollout, advantages), Learner(CONFIG))
    other, _ = GRADIENTS(state.model, ROWS(dirty, advantages), Learner(CONFIG))
    for one, two in zip(jax.tree.leaves(clean), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_an_empty_rollout_moves_nothing_and_stays_finite(state):
    """The whole update; the gradients of every other loss are in `test_no_loss_moves_an_empty_rollout`."""
    rollout = dataclasses.replace(rollout_of(state), lengths=jnp.zeros(16, jnp.int32))
    rewards = Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
    after, metrics = updated(state, rollout, rewards)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(metrics))
    for one, two in zip(jax.tree.leaves(state.model), jax.tree.leaves(after.model), strict=True):
        np.testing.assert_array_equal(one, two)


def test_equal_rewards_move_nothing(state):
    rewards = Rewards(jnp.full(16, 0.1), jnp.zeros(16, bool))
    after, metrics = updated(state, rollout_of(state), rewards)
    assert metrics.loss == 0
    assert metrics.grad_norm == 0
    for one, two in zip(jax.tree.leaves(state.model), jax.tree.leaves(after.model), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_later_passes_move_on_from_the_first(state):
    rollout, rewards = rollout_of(state), Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
    config = dataclasses.replace(CONFIG, learning_rate=0.05, num_updates=3)
    optimizer = make_optimizer(config, 10)
    after, metrics = updated(init_state(state.model, optimizer, 0), rollout, rewards, config, optimizer)
    assert metrics.max_ratio_error <= 1e-5, "reported for the first pass, which has the weights that sampled"
    assert metrics.clip_fraction > 0, "steep steps push ratios of later passes into the clip"
    assert int(after.step) == 1
    # A step of Adam is at most the learning rate, and the first one close to it.
    assert float(jnp.abs(after.model.head - state.model.head).max()) > 1.2 * config.learning_rate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "requires logprobs_mode='processed_logprobs'"),
        ({"returns_support": np.arange(16) > 3}, "left their supports out"),
    ],
)
def test_a_rollout_that_cannot_be_replayed_is_refused(state, change, message):
    rollout, config = rollout_of(state), CONFIG
    if "logprobs_mode" in change:
        rollout = dataclasses.replace(rollout, **change)
    else:
        arrays = {name: jnp.asarray(value) for name, value in change.items()}
        rollout = dataclasses.replace(rollout, sampling=dataclasses.replace(rollout.sampling, **arrays))
    rewards = Rewards(jnp.zeros(16), jnp.zeros(16, bool))
    with pytest.raises(ValueError, match=message):
        grpo_step(state, rollout, rewards, config=config, optimizer=OPTIMIZER)


@pytest.mark.slow
def test_a_rollout_with_edits_is_replayed(state):
    """Penalties, bias and withheld ids, in one batch with rows that use none; in micro-batches too."""
    edits = [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"logit_bias": {2: 3.0}}]
    edits.append({"min_tokens": 2, "stop_token_ids": [4]})
    params = [SamplingParams(top_k=4, top_p=0.9, max_tokens=3, seed=row, **edits[row % 5 % 4]) for row in range(16)]
    batch = SamplingBatch.from_params(params, vocab_size=TASK.vocab_size, support_bound=4)
    prompts = TASK.prompts(jax.random.key(5), CONFIG.num_prompts)
    prompts = [jnp.asarray(leaf) for leaf in (prompts.token_ids, prompts.lengths)]
    rollout = jax.jit(functools.partial(generate, max_new_tokens=3, width=4, group_size=4))(
        state.model, batch, *prompts
    )
    rewards = Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
    config = dataclasses.replace(CONFIG, num_micro_batches=2)
    _, metrics = updated(state, rollout, rewards, config)
    assert metrics.max_ratio_error <= 1e-5
    assert metrics.clip_fraction == 0
    # Without the edits the policy would be another one.
    neutral = {"repetition_penalty": jnp.ones(16), "logit_bias_values": jnp.zeros_like(batch.logit_bias_values)}
    other = dataclasses.replace(rollout, sampling=dataclasses.replace(rollout.sampling, **neutral))
    _, metrics = updated(state, other, rewards, config)
    assert metrics.max_ratio_error > 1e-3


@pytest.mark.slow
def test_ids_of_a_padded_head_are_neither_drawn_nor_scored(state):
    prompts = TASK.prompts(jax.random.key(5), CONFIG.num_prompts)
    rollout = collect_for_host(state, prompts, config=CONFIG, vocab_size=7, eos_token_ids=())
    assert int(rollout.token_ids.max()) < 7
    rewards = Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
    config = dataclasses.replace(CONFIG, sampling_mask=False)
    _, metrics = updated(state, rollout, rewards, config)
    # Over 7 ids the entropy cannot exceed ln 7.
    assert metrics.entropy <= np.log(7) + 1e-6


@pytest.mark.slow
def test_the_host_path_moves_ids_down_and_rewards_up_only(state):
    prompts = jax.device_put(TASK.prompts(jax.random.key(1), CONFIG.num_prompts))
    rewards = jax.device_put(Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool)))
    warm = init_state(make_model(), OPTIMIZER, 0)
    rollout = collect_for_host(warm, prompts, config=CONFIG, vocab_size=TASK.vocab_size, eos_token_ids=())
    update_from_host(warm, rollout, rewards, config=CONFIG, optimizer=OPTIMIZER)
    with jax.transfer_guard("disallow"):
        rollout = collect_for_host(state, prompts, config=CONFIG, vocab_size=TASK.vocab_size, eos_token_ids=())
        state, metrics = update_from_host(state, rollout, rewards, config=CONFIG, optimizer=OPTIMIZER)
    assert metrics.max_ratio_error <= 1e-5


def test_join_puts_each_completion_behind_its_own_prompt():
    prompts = jnp.array([[7, 8, 0], [4, 5, 6]], jnp.int32)
    joined = _join(prompts, jnp.array([2, 3], jnp.int32), jnp.array([[1, 2], [3, 9]], jnp.int32))
    assert joined.shape == (2, 4)
    assert joined[0, :3].tolist() == [7, 8, 1]
    assert joined[1].tolist() == [4, 5, 6, 3]


def test_master_weights_are_float32_and_take_small_steps(state):
    """P53: 1000 updates of 1e-6 move a weight of 1 by 1.0133e-3; in bfloat16 they would not move it at all."""
    config = dataclasses.replace(CONFIG, learning_rate=1e-6)
    optimizer = make_optimizer(config, 1000)
    model = jax.tree.map(jnp.ones_like, state.model)
    gradients = jax.tree.map(jnp.ones_like, model)

    def update(state, _):
        model, opt_state = apply_gradients(state, gradients, optimizer)
        return dataclasses.replace(state, model=model, opt_state=opt_state), None

    moved, _ = jax.lax.scan(update, init_state(model, optimizer, 0), None, length=1000)
    for leaf in jax.tree.leaves(moved.model):
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(1 - leaf, 1.0133e-3, rtol=0.02)
    assert jnp.bfloat16(1) - jnp.bfloat16(1.5e-3) == 1
    with pytest.raises(ValueError, match="must be float32, got bfloat16"):
        init_state(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model), optimizer, 0)


@pytest.mark.slow
def test_an_iteration_with_the_kernels_is_the_plain_one(state):
    """The same tokens and supports, and weights as close as rounding leaves them."""
    config = dataclasses.replace(CONFIG, implementation="interpret")
    plain, kernel = rollout_of(state), rollout_of(state, config)
    np.testing.assert_array_equal(kernel.token_ids, plain.token_ids)
    np.testing.assert_array_equal(kernel.support.token_ids, plain.support.token_ids)
    rewards = TASK.score(plain)
    moved, metrics = updated(state, plain, rewards)
    moved_by_kernel, kernel_metrics = updated(state, kernel, rewards, config)
    assert abs(float(kernel_metrics.loss) - float(metrics.loss)) < 1e-6
    assert float(metrics.grad_norm) == pytest.approx(float(kernel_metrics.grad_norm), rel=1e-4)
    for expected, found in zip(jax.tree.leaves(moved.model), jax.tree.leaves(moved_by_kernel.model), strict=True):
        # Adam divides by the gradient's size, so a step is at most the learning rate: a tenth of it is rounding.
        np.testing.assert_allclose(found, expected, atol=CONFIG.learning_rate / 10)


# Every loss, advantage and aggregation once, with all that can be added to them.
OBJECTIVES = {
    "dr-grpo": {"aggregation": "constant-length", "clip_epsilon_high": 0.28},
    "gspo": {"loss": "gspo", "aggregation": "seq-mean-token-mean", "entropy_coefficient": 0.01},
    "gspo-token": {"loss": "gspo-token", "aggregation": "token-mean", "sequence_ratio_max": 1.05},
    "cispo": {"loss": "cispo", "tis_cap": 1.05, "num_updates": 2},
    "reinforce": {"loss": "reinforce", "aggregation": "seq-mean-token-sum", "tis_cap": 1.05, "sequence_ratio_min": 0.9},
}


def off_policy_rows(state):
    """Rows of unequal lengths, of which one has no token, sampled by another policy."""
    rollout = dataclasses.replace(rollout_of(state), lengths=jnp.asarray(np.arange(16) % 4, jnp.int32))
    rows = ROWS(rollout, jnp.asarray(np.linspace(-1, 1, 16), jnp.float32))
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, rows.behaviour_logprobs.shape)
    return dataclasses.replace(rows, behaviour_logprobs=rows.behaviour_logprobs + jnp.asarray(noise, jnp.float32))


# Each loss in one cut besides the whole: what it or its aggregation asks of whole sequences must hold in whatever cut.
CUTS = dict(zip(OBJECTIVES, (4, 4, 2, 2, 4), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_loss_depends_on_the_cut(state, name):
    config = dataclasses.replace(CONFIG, **OBJECTIVES[name])
    rows = off_policy_rows(state)
    whole, seen = GRADIENTS(state.model, rows, Learner(config))
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(whole)) > 1e-3
    parts, seen_parts = GRADIENTS(state.model, rows, Learner(dataclasses.replace(config, num_micro_batches=CUTS[name])))
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * float(jnp.abs(one).max() + 1))
    np.testing.assert_allclose(seen.loss, seen_parts.loss, atol=1e-6)
    assert seen.clip_fraction == seen_parts.clip_fraction


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_loss_moves_an_empty_rollout(state, name):
    """By the program of the test above: no gradient, and nothing that a metric is made of is not finite."""
    config = dataclasses.replace(CONFIG, **OBJECTIVES[name])
    rollout = dataclasses.replace(rollout_of(state), lengths=jnp.zeros(16, jnp.int32))
    rows = ROWS(rollout, jnp.asarray(np.linspace(-1, 1, 16), jnp.float32))
    gradients, seen = GRADIENTS(state.model, rows, Learner(config))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(seen))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_corrections_do_nothing_on_the_policys_own_tokens(state):
    rows = ROWS(rollout_of(state), jnp.asarray(np.linspace(-1, 1, 16), jnp.float32))
    plain, _ = GRADIENTS(state.model, rows, Learner(CONFIG))
    config = dataclasses.replace(CONFIG, tis_cap=2.0, sequence_ratio_min=0.99, sequence_ratio_max=1.01)
    corrected, _ = GRADIENTS(state.model, rows, Learner(config))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(corrected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(one).max() + 1))


def test_the_old_policy_is_the_one_before_the_first_update(state):
    rows = ROWS(rollout_of(state), jnp.zeros(16))
    for num_micro_batches in (1, 4):
        config = dataclasses.replace(CONFIG, num_micro_batches=num_micro_batches)
        np.testing.assert_allclose(LOGPROBS(state.model, rows, Learner(config)), rows.behaviour_logprobs, atol=1e-5)


def test_long_completions_lose_reward_where_the_config_says_so(state):
    rollout = dataclasses.replace(rollout_of(state), lengths=jnp.asarray([1, 2, 3, 3] * 4, jnp.int32))
    rewards = Rewards(jnp.ones(16), jnp.zeros(16, bool))
    assert (np.asarray(_advantages(rollout, rewards, CONFIG)) == 0).all()
    config = dataclasses.replace(CONFIG, overlong_buffer=2, advantages="dr-grpo")
    # Rewards 1, 0.5, 0 and 0 about their mean.
    np.testing.assert_allclose(_advantages(rollout, rewards, config), [0.625, 0.125, -0.375, -0.375] * 4, rtol=1e-6)


def finite_and_moved(before, after, metrics):
    assert metrics.max_ratio_error <= 1e-5
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(metrics))
    assert metrics.grad_norm > 0
    assert np.abs(np.asarray(after.model.head) - before).max() > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("cispo", "dapo")])
def test_every_published_algorithm_moves_the_policy(state, name):
    """In one program, behind the rollout and the rewards, which no algorithm has a say in.

    CISPO is below. DAPO has the loss and the aggregation of REINFORCE++ here, and the advantages of GRPO.
    """
    config = dataclasses.replace(as_published(CONFIG, name), num_updates=2)
    rollout = rollout_of(state)
    after, metrics = updated(state, rollout, TASK.score(rollout), config)
    finite_and_moved(np.asarray(state.model.head), after, metrics)


@pytest.mark.slow
def test_an_algorithm_with_everything_is_one_program_with_its_rollout(state):
    """Two passes, old log-probs of their own, corrections and a bonus, traced together with the sampler."""
    everything = {"tis_cap": 1.05, "sequence_ratio_max": 1.05, "entropy_coefficient": 0.01, "num_updates": 2}
    config = dataclasses.replace(as_published(CONFIG, "cispo"), num_micro_batches=2, **everything)
    before = np.asarray(state.model.head)
    after, metrics = train_iteration(state, task=TASK, config=config, optimizer=OPTIMIZER)
    finite_and_moved(before, after, metrics)


@pytest.mark.slow
def test_later_passes_of_an_empty_rollout_move_nothing(state):
    """Old log-probs of the iteration's start, where no token was sampled."""
    config = dataclasses.replace(CONFIG, **OBJECTIVES["cispo"])
    rollout = dataclasses.replace(rollout_of(state), lengths=jnp.zeros(16, jnp.int32))
    rewards = Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
    after, metrics = updated(state, rollout, rewards, config)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(metrics))
    for one, two in zip(jax.tree.leaves(state.model), jax.tree.leaves(after.model), strict=True):
        np.testing.assert_array_equal(one, two)
