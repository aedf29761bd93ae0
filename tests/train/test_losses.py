import dataclasses

import jax
import jax.numpy as jnp
import loss_oracle
import numpy as np
import pytest
from tolerances import GRADIENT

from train.losses import (
    LossInputs,
    cispo_loss,
    entropy_total,
    grpo_loss,
    gspo_loss,
    gspo_token_loss,
    reinforce_loss,
    sequence_mean,
    weighted_total,
)

LOW, HIGH = 0.2, 0.28
# Each loss with the same clip, and the formula it has to agree with.
LOSSES = {
    "grpo": (lambda inputs: grpo_loss(inputs, clip_epsilon=LOW, clip_epsilon_high=HIGH), loss_oracle.grpo),
    "gspo": (lambda inputs: gspo_loss(inputs, clip_epsilon=LOW, clip_epsilon_high=HIGH), loss_oracle.gspo),
    "gspo-token": (
        lambda inputs: gspo_token_loss(inputs, clip_epsilon=LOW, clip_epsilon_high=HIGH),
        loss_oracle.gspo_token,
    ),
    "cispo": (lambda inputs: cispo_loss(inputs, clip_epsilon_high=HIGH), loss_oracle.cispo),
    "reinforce": (reinforce_loss, loss_oracle.reinforce),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def inputs(log_ratio, advantages, mask=None):
    log_ratio = jnp.asarray(np.array(log_ratio, np.float32))
    mask = jnp.ones(log_ratio.shape, bool) if mask is None else jnp.asarray(np.array(mask, bool))
    return LossInputs(
        log_ratio - 1.0, jnp.full(log_ratio.shape, -1.0), jnp.asarray(np.array(advantages, np.float32)), mask
    )


def random_inputs(seed, *, per_token=False, everything=True):
    """Ragged rows, the first without a token, ratios on both sides of the clip."""
    rng = np.random.default_rng(seed)
    shape = (6, 9)

    def array(low, high, of=shape):
        return jnp.asarray(rng.uniform(low, high, of).astype(np.float32))

    lengths = np.concatenate([[0], rng.integers(1, shape[1] + 1, shape[0] - 1)])
    behaviour = array(-3, -0.5)
    given = LossInputs(
        behaviour + array(-0.4, 0.4) + array(-0.6, 0.6, (shape[0], 1)),
        behaviour,
        array(-2, 2, shape if per_token else shape[:1]),
        jnp.asarray(np.arange(shape[1]) < lengths[:, None]),
    )
    if not everything:
        return given
    return dataclasses.replace(
        given,
        weights=array(0, 2),
        old_logprobs=behaviour + array(-0.3, 0.3),
        correction=array(0, 2),
        ref_logprobs=behaviour,
        kl=array(0, 1),
        entropy=array(0, 1),
    )


def value_and_slope(loss, given):
    return jax.value_and_grad(lambda logprobs: loss(dataclasses.replace(given, logprobs=logprobs)).total)(
        given.logprobs
    )


def test_hand_computed_clips():
    ratios = np.array([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
    output = grpo_loss(inputs(np.log(ratios), [2.0, -1.0]), clip_epsilon=0.2)
    # A = 2: min(ratio, clip) = .5, 1, 1.2.  A = -1: max(ratio, clip) = .8, 1, 1.5.
    np.testing.assert_allclose(output.total, -2 * (0.5 + 1 + 1.2) + (0.8 + 1 + 1.5), rtol=1e-6)
    assert output.num_tokens == 6
    assert output.num_clipped == 2
    np.testing.assert_allclose(output.ratio, ratios, rtol=1e-6)


def test_clip_higher_moves_the_upper_bound_alone():
    output = grpo_loss(inputs(np.log([[0.5, 1.5], [0.5, 1.5]]), [1.0, -1.0]), clip_epsilon=0.2, clip_epsilon_high=0.28)
    np.testing.assert_allclose(output.total, -(0.5 + 1.28) + (0.8 + 1.5), rtol=1e-6)


def test_hand_computed_sequence_ratios():
    # Ratios .5 and 1.125: geometric mean .75.  Ratios 1 and 4: 2.
    given = inputs(np.log([[0.5, 1.125], [1.0, 4.0]]), [1.0, 1.0])
    output = gspo_loss(given, clip_epsilon=0.2)
    np.testing.assert_allclose(output.total, -(2 * 0.75 + 2 * 1.2), rtol=1e-6)
    assert output.num_clipped == 2, "the two tokens of the second sequence"


def test_hand_computed_clipped_weights():
    # log pi = log ratio - 1: weights .5 (no lower bound), 1, 1.2.
    ratios = np.array([[0.5, 1.0, 1.5]])
    output = cispo_loss(inputs(np.log(ratios), [2.0]), clip_epsilon_high=0.2)
    np.testing.assert_allclose(output.total, -2 * ([0.5, 1.0, 1.2] @ (np.log(ratios[0]) - 1)), rtol=1e-6)
    assert output.num_clipped == 1
    bounded = cispo_loss(inputs(np.log(ratios), [2.0]), clip_epsilon_high=0.2, clip_epsilon=0.2)
    np.testing.assert_allclose(bounded.total, -2 * ([0.8, 1.0, 1.2] @ (np.log(ratios[0]) - 1)), rtol=1e-6)


def test_hand_computed_reinforce():
    output = reinforce_loss(inputs([[0.5, 0.0], [0.0, 1.0]], [2.0, -1.0], [[True, True], [True, False]]))
    np.testing.assert_allclose(output.total, -2 * (-0.5 - 1) + (-1), rtol=1e-6)
    assert output.num_clipped == 0


@every_loss
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_are_the_closed_forms(name, per_token, seed):
    loss, formula = LOSSES[name]
    for everything in (False, True):
        given = random_inputs(seed, per_token=per_token, everything=everything)
        value, slope = value_and_slope(loss, given)
        expected, expected_slope = loss_oracle.total_and_gradient(formula, given, 1 - LOW, 1 + HIGH)
        np.testing.assert_allclose(value, expected, rtol=GRADIENT, atol=GRADIENT)
        np.testing.assert_allclose(slope, expected_slope, rtol=0, atol=GRADIENT * np.abs(expected_slope).max())


@every_loss
def test_the_random_cases_meet_the_clip(name):
    outputs = [LOSSES[name][0](random_inputs(seed)) for seed in range(4)]
    clipped, tokens = (
        sum(float(getattr(output, field)) for output in outputs) for field in ("num_clipped", "num_tokens")
    )
    assert clipped == 0 if name == "reinforce" else tokens / 20 < clipped < tokens / 2


@every_loss
def test_compiled_is_not_compiled(name):
    loss, given = LOSSES[name][0], random_inputs(5)
    np.testing.assert_allclose(jax.jit(loss)(given).total, loss(given).total, rtol=GRADIENT)


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo-token", "cispo"])
def test_only_old_logprobs_move_the_clip_and_the_reported_ratio_stays_that_of_the_rollout(name):
    given = random_inputs(6, everything=False)
    moved = dataclasses.replace(given, old_logprobs=given.logprobs)
    output = LOSSES[name][0](moved)
    assert output.num_clipped == 0
    np.testing.assert_array_equal(output.ratio, LOSSES[name][0](given).ratio)


def test_one_advantage_per_completion_makes_both_sequence_losses_one():
    given = random_inputs(7)
    (value, slope), (other, other_slope) = (value_and_slope(LOSSES[name][0], given) for name in ("gspo", "gspo-token"))
    np.testing.assert_allclose(value, other, rtol=1e-6)
    # With equal weights within each sequence, as every aggregation has them, the gradients agree too.
    given = dataclasses.replace(given, weights=None, correction=None)
    (_, slope), (_, other_slope) = (value_and_slope(LOSSES[name][0], given) for name in ("gspo", "gspo-token"))
    np.testing.assert_allclose(slope, other_slope, rtol=0, atol=GRADIENT * np.abs(slope).max())


def test_padding_is_no_part_of_a_sequences_advantage():
    """P47."""
    given = dataclasses.replace(
        inputs([[0.0] * 4], [0.0], [[True, True, False, False]]), advantages=jnp.array([[1.0, 1.0, 10.0, 10.0]])
    )
    np.testing.assert_allclose(sequence_mean(given.advantages, given.loss_mask), [1.0])
    np.testing.assert_allclose(gspo_loss(given, clip_epsilon=0.2).total, -2.0)


@every_loss
def test_a_huge_ratio_at_no_advantage_gives_nothing(name):
    """P49."""
    value, slope = value_and_slope(LOSSES[name][0], inputs([[100.0]], [0.0]))
    assert value == 0
    assert slope == 0


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo-token"])
def test_a_huge_ratio_on_a_good_completion_is_clipped(name):
    """P49."""
    value, slope = value_and_slope(LOSSES[name][0], inputs([[100.0]], [1.0]))
    np.testing.assert_allclose(value, -1.28, rtol=1e-6)
    assert slope == 0


@every_loss
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e30, -1e30])
def test_a_huge_ratio_on_a_bad_completion_stays_finite(name, log_ratio):
    """P49."""
    value, slope = value_and_slope(LOSSES[name][0], inputs([[log_ratio]], [-1.0]))
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


@every_loss
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 7.0])
def test_cells_outside_the_mask_change_nothing_bit_for_bit(name, garbage):
    """P54."""
    given = random_inputs(8, per_token=True)
    mask = given.loss_mask

    def run(fill):
        fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        dirty = {key: jnp.where(mask, value, fill) for key, value in fields.items() if key != "loss_mask"}
        dirty = LossInputs(**dirty, loss_mask=mask)

        def total(logprobs, entropy):
            filled = dataclasses.replace(dirty, logprobs=logprobs, entropy=entropy)
            return LOSSES[name][0](filled).total - 0.1 * entropy_total(filled)

        return jax.value_and_grad(total, argnums=(0, 1))(dirty.logprobs, dirty.entropy)

    (clean, clean_slopes), (value, slopes) = run(0.0), run(garbage)
    assert np.isfinite(clean)
    assert value == clean
    for slope, clean_slope in zip(slopes, clean_slopes, strict=True):
        np.testing.assert_array_equal(slope, clean_slope)
        assert (np.asarray(slope)[~np.asarray(mask)] == 0).all()


@every_loss
def test_an_empty_mask_gives_zero(name):
    given = dataclasses.replace(random_inputs(9), loss_mask=jnp.zeros((6, 9), bool))
    value, slope = value_and_slope(LOSSES[name][0], given)
    output = LOSSES[name][0](given)
    assert value == output.num_tokens == output.num_clipped == 0
    assert (np.asarray(slope) == 0).all()
    assert (np.asarray(output.ratio) == 1).all()


def test_corrections_are_constants():
    given = random_inputs(10)

    def total(correction):
        return grpo_loss(dataclasses.replace(given, correction=correction), clip_epsilon=0.2).total

    assert (np.asarray(jax.grad(total)(given.correction)) == 0).all()


def test_entropy_counts_with_the_weights_of_the_loss():
    given = dataclasses.replace(
        inputs([[0.0, 0.0, 0.0]], [0.0], [[True, True, False]]),
        entropy=jnp.array([[0.5, 2.0, 9.0]]),
        weights=jnp.array([[1.0, 0.25, 9.0]]),
    )
    np.testing.assert_allclose(entropy_total(given), 1.0)
    np.testing.assert_allclose(weighted_total(dataclasses.replace(given, weights=None), given.entropy), 2.5)
    with pytest.raises(ValueError, match=r"an entropy bonus needs LossInputs\.entropy"):
        entropy_total(dataclasses.replace(given, entropy=None))
