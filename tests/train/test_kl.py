import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import GRADIENT, LOGPROB

from train.kl import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3, kl_total, token_kl
from train.losses import LossInputs

# Values and derivatives with respect to log pi, float64, of d = log ref - log pi.
EXACT = {
    "k1": (lambda d: -d, lambda d: np.ones_like(d)),
    "k2": (lambda d: d**2 / 2, lambda d: -d),
    "k3": (lambda d: np.expm1(d) - d, lambda d: -np.expm1(d)),
}


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065306597)])
def test_hand_computed(estimator, expected):
    """P50."""
    np.testing.assert_allclose(KL_ESTIMATORS[estimator](jnp.float32(-1.0), jnp.float32(-1.5)), expected, rtol=1e-6)


@pytest.mark.parametrize("estimator", EXACT)
def test_values_and_gradients_are_the_closed_forms(estimator):
    logprobs = np.random.default_rng(0).uniform(-8, 0, 200).astype(np.float32)
    ref = np.concatenate([np.random.default_rng(1).uniform(-8, 0, 100), logprobs[100:] + np.geomspace(1e-6, 0.2, 100)])
    ref = ref.astype(np.float32)
    d = ref.astype(np.float64) - logprobs.astype(np.float64)
    value, slope = EXACT[estimator]
    kl = KL_ESTIMATORS[estimator]
    np.testing.assert_allclose(kl(jnp.asarray(logprobs), jnp.asarray(ref)), value(d), rtol=LOGPROB, atol=0)
    found = jax.grad(lambda x: kl(x, jnp.asarray(ref)).sum())(jnp.asarray(logprobs))
    np.testing.assert_allclose(found, slope(d), rtol=GRADIENT, atol=0)


def test_k3_is_never_negative():
    """P50."""
    d = np.concatenate([np.geomspace(1e-12, 10, 2000), -np.geomspace(1e-12, 100, 2000), [0.0, 1e30, -1e30]])
    values = np.asarray(kl_k3(jnp.zeros(d.shape), jnp.asarray(d.astype(np.float32))))
    assert (values >= 0).all()
    assert np.isfinite(values).all()


def test_k3_stays_finite_where_the_exponent_would_not():
    for log_ratio in (100.0, -100.0):
        value, slope = jax.value_and_grad(lambda ref: kl_k3(jnp.float32(0.0), ref))(jnp.float32(log_ratio))
        assert np.isfinite(value)
        assert np.isfinite(slope)
    assert jax.grad(lambda lp: kl_k3(lp, jnp.float32(0.0)))(jnp.float32(-100.0)) == 0
    np.testing.assert_allclose(jax.grad(lambda lp: kl_k3(lp, jnp.float32(-100.0)))(jnp.float32(0.0)), 1.0)


def softmax(x):
    exponent = np.exp(x - x.max())
    return exponent / exponent.sum()


def test_expectations_over_a_whole_vocabulary():
    """k1 and k3 average to KL(pi || ref); the gradient of k2 to that of KL(pi || ref), that of k3 to KL(ref || pi)."""
    z, ref_z = np.array([0.3, -0.8, 1.1, 0.0]), np.array([0.0, 0.5, 0.4, -1.0])
    pi, ref = softmax(z), softmax(ref_z)
    kl = float(pi @ np.log(pi / ref))
    ref_logprobs = jnp.asarray(np.log(ref).astype(np.float32))

    def per_token(logits, estimator):
        return KL_ESTIMATORS[estimator](jax.nn.log_softmax(logits), ref_logprobs)

    logits = jnp.asarray(z.astype(np.float32))
    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(pi @ np.asarray(per_token(logits, estimator)), kl, rtol=LOGPROB)
    gradients = {estimator: pi @ np.asarray(jax.jacobian(per_token)(logits, estimator)) for estimator in EXACT}
    np.testing.assert_allclose(gradients["k1"], np.zeros(4), atol=GRADIENT)
    np.testing.assert_allclose(gradients["k2"], pi * (np.log(pi / ref) - kl), atol=GRADIENT)
    np.testing.assert_allclose(gradients["k3"], pi - ref, atol=GRADIENT)


def given():
    return LossInputs(
        logprobs=jnp.array([[-1.0, -1.0, -2.0]]),
        behaviour_logprobs=jnp.zeros((1, 3)),
        advantages=jnp.zeros(1),
        loss_mask=jnp.array([[True, True, False]]),
        weights=jnp.array([[1.0, 2.0, 4.0]]),
        ref_logprobs=jnp.array([[-1.5, -1.0, -9.0]]),
        kl=jnp.array([[0.25, 0.5, 9.0]]),
    )


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065306597), ("exact", 0.25 + 2 * 0.5)]
)
def test_totals_are_weighted_like_the_loss(estimator, expected):
    np.testing.assert_allclose(kl_total(given(), estimator), expected, rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_cells_outside_the_mask_change_nothing(estimator, garbage):
    clean, mask = given(), given().loss_mask

    def run(fill):
        def total(logprobs, kl):
            dirty = dataclasses.replace(clean, ref_logprobs=jnp.where(mask, clean.ref_logprobs, fill))
            return kl_total(dataclasses.replace(dirty, logprobs=logprobs, kl=kl), estimator)

        return jax.value_and_grad(total, argnums=(0, 1))(
            jnp.where(mask, clean.logprobs, fill), jnp.where(mask, clean.kl, fill)
        )

    (value, slopes), (dirty_value, dirty_slopes) = run(0.0), run(garbage)
    assert value == dirty_value
    for slope, dirty in zip(slopes, dirty_slopes, strict=True):
        np.testing.assert_array_equal(slope, dirty)
        assert slope[0, 2] == 0


def test_the_policy_itself_is_at_no_distance():
    same = dataclasses.replace(given(), ref_logprobs=given().logprobs)
    for estimator in KL_ESTIMATORS:
        assert (np.asarray(token_kl(same, estimator)) == 0).all()
    assert kl_k1(jnp.float32(-3.0), jnp.float32(-3.0)) == kl_k2(jnp.float32(-3.0), jnp.float32(-3.0)) == 0


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="kl_estimator must be one of k1, k2, k3, exact, got 'k4'"):
        token_kl(given(), "k4")
    with pytest.raises(ValueError, match=r"kl_estimator 'k3' needs LossInputs\.ref_logprobs"):
        token_kl(dataclasses.replace(given(), ref_logprobs=None), "k3")
    with pytest.raises(ValueError, match=r"kl_estimator 'exact' needs LossInputs\.kl"):
        token_kl(dataclasses.replace(given(), kl=None), "exact")
