import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances

from jaxmask import (
    Reference,
    Support,
    full_scores,
    gathered,
    masked_log_probs,
    support_log_probs,
    support_scores,
)

pytestmark = pytest.mark.unoptimized
# Those that ask for equal bits.
OPTIMIZED = pytest.mark.optimized

D, V = 5, 19


NUM_ROWS = 24


@functools.cache
def case(num_rows=NUM_ROWS, seed=0):
    """Hidden states, head, supports of every size with a token in each, temperatures."""
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(num_rows, D)), rng.normal(size=(V, D))
    lists = [np.sort(rng.permutation(V)[: 1 + row % V]).tolist() for row in range(num_rows)]
    token_ids = np.array([rng.choice(ids) for ids in lists], np.int32)
    temperatures = rng.uniform(0.3, 2, num_rows)
    return hidden, head, lists, token_ids, temperatures


def f32(x) -> jax.Array:
    return jnp.asarray(np.asarray(x, np.float32))


def keep_of(lists) -> np.ndarray:
    keep = np.zeros((len(lists), V), bool)
    for row, ids in zip(keep, lists, strict=True):
        row[ids] = True
    return keep


def make_support(lists, form) -> Support:
    """The same supports in cells alone, or in too few cells with bits beside them; as many rows as in `case`."""
    lists = [*lists, *[[]] * (NUM_ROWS - len(lists))]
    return Support.from_lists(lists, V, width=V if form == "compact" else 3)


def make_ids(token_ids) -> jax.Array:
    """As many as in `case`."""
    ids = np.zeros(NUM_ROWS, np.int32)
    ids[: len(token_ids)] = token_ids
    return jnp.asarray(ids)


# One program of each form of supports for all tests: op by op, every operation would be a program of its own.
@jax.jit
def pulled(hidden, head, support, token_ids, temperature, d_logprobs, d_entropy):
    """Log-probabilities and entropy, and the gradients of their sums with these weights."""

    def score(hidden, head):
        scores = support_scores(hidden, head, support, token_ids, temperature=temperature)
        return scores.logprobs, scores.entropy

    values, pullback = jax.vjp(score, hidden, head)
    return values, pullback((d_logprobs, d_entropy))


@jax.jit
def pulled_from_logits(logits, support, token_ids, temperature, weights):
    """Log-probabilities, and the gradient of their sum with these weights."""
    values, pullback = jax.vjp(lambda x: masked_log_probs(x, support, token_ids, temperature=temperature), logits)
    return values, pullback(weights)[0]


def pull(hidden, head, support, token_ids, *, temperature=1.0, d_logprobs=1.0, d_entropy=0.0):
    """`pulled`, of numbers for all rows or one for each."""
    of_rows = (f32(np.broadcast_to(x, NUM_ROWS)) for x in (temperature, d_logprobs, d_entropy))
    return pulled(hidden, head, support, token_ids, *of_rows)


FORMS = pytest.mark.parametrize("form", ["compact", "packed"])


def right_gradients(hidden, head, keep, token_ids, temperature, weights):
    """Of sum_n w_n log p_n: d z_v = w (1[v = a] - p_v) / T on the support and 0 elsewhere; float64."""
    logits = hidden @ head.T
    p = np.exp(oracle.log_probs(logits, keep, temperature))
    one_hot = np.arange(V)[None, :] == token_ids[:, None]
    d_logits = np.where(keep, weights[:, None] * (one_hot - p) / temperature[:, None], 0)
    return d_logits, d_logits @ head, d_logits.T @ hidden


def assert_gradient(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.GRADIENT * max(1.0, np.abs(expected).max()))


@OPTIMIZED
@FORMS
def test_values_are_the_oracles(form):
    hidden, head, lists, token_ids, temperatures = case()
    support, keep = make_support(lists, form), keep_of(lists)
    logits = hidden @ head.T
    expected = np.take_along_axis(oracle.log_probs(logits, keep, temperatures), token_ids[:, None], axis=1)[:, 0]

    @jax.jit
    def values(hidden, head, logits, *arguments, temperature):
        scores = support_scores(hidden, head, *arguments, temperature=temperature)
        alone = support_log_probs(hidden, head, *arguments, temperature=temperature)
        return scores, alone, masked_log_probs(logits, *arguments, temperature=temperature)

    scores, alone, masked = values(
        f32(hidden), f32(head), f32(logits), support, jnp.asarray(token_ids), temperature=f32(temperatures)
    )
    np.testing.assert_allclose(scores.logprobs, expected, atol=tolerances.LOGPROB)
    np.testing.assert_allclose(scores.entropy, oracle.entropy(logits, keep, temperatures), atol=tolerances.LOGPROB)
    np.testing.assert_array_equal(alone, scores.logprobs)
    np.testing.assert_allclose(masked, expected, atol=tolerances.LOGPROB)


def test_full_scores_are_the_oracles():
    hidden, head, _, token_ids, temperatures = case(200, 1)
    logits = hidden @ head.T
    scores = jax.jit(full_scores)(f32(hidden), f32(head), jnp.asarray(token_ids), temperature=f32(temperatures))
    lp = oracle.log_probs(logits, temperature=temperatures)
    np.testing.assert_allclose(
        scores.logprobs, np.take_along_axis(lp, token_ids[:, None], axis=1)[:, 0], atol=tolerances.LOGPROB
    )
    everything = np.ones_like(logits, bool)
    np.testing.assert_allclose(
        scores.entropy, oracle.entropy(logits, everything, temperatures), atol=tolerances.LOGPROB
    )


@FORMS
def test_gradients_are_the_closed_form(form):
    hidden, head, lists, token_ids, temperatures = case()
    support, keep = make_support(lists, form), keep_of(lists)
    weights = np.random.default_rng(3).normal(size=len(lists))
    right = right_gradients(hidden, head, keep, token_ids, temperatures, weights)

    arguments = support, jnp.asarray(token_ids)
    _, (d_hidden, d_head) = pull(f32(hidden), f32(head), *arguments, temperature=temperatures, d_logprobs=weights)
    _, d_logits = pulled_from_logits(f32(hidden @ head.T), *arguments, f32(temperatures), f32(weights))
    assert_gradient(d_logits, right[0])
    assert_gradient(d_hidden, right[1])
    assert_gradient(d_head, right[2])
    assert not np.asarray(d_logits)[~keep].any()


def test_gradients_are_finite_differences():
    """The closed form above, checked once against differences of the float64 oracle."""
    hidden, head, lists, token_ids, temperatures = case()
    keep, weights = keep_of(lists), np.random.default_rng(3).normal(size=len(lists))

    def objective(hidden, head):
        lp = oracle.log_probs(hidden @ head.T, keep, temperatures)
        return (weights * np.take_along_axis(lp, token_ids[:, None], axis=1)[:, 0]).sum()

    _, d_hidden, d_head = right_gradients(hidden, head, keep, token_ids, temperatures, weights)
    rng = np.random.default_rng(4)
    for _ in range(10):
        to_hidden, to_head, step = rng.normal(size=hidden.shape), rng.normal(size=head.shape), 1e-6
        ahead = objective(hidden + step * to_hidden, head + step * to_head)
        behind = objective(hidden - step * to_hidden, head - step * to_head)
        expected = (d_hidden * to_hidden).sum() + (d_head * to_head).sum()
        assert (ahead - behind) / (2 * step) == pytest.approx(expected, rel=1e-6)


@FORMS
def test_gradient_of_the_entropy(form):
    """d H / d z_v = -p_v (log p_v + H) / T on the support."""
    hidden, head, lists, token_ids, temperatures = case()
    support, keep = make_support(lists, form), keep_of(lists)
    lp = oracle.log_probs(hidden @ head.T, keep, temperatures)
    entropy = oracle.entropy(hidden @ head.T, keep, temperatures)[:, None]
    finite_lp = np.where(keep, lp, 0)
    d_logits = np.where(keep, -np.exp(lp) * (finite_lp + entropy) / temperatures[:, None], 0)

    _, (d_hidden, _) = pull(
        f32(hidden),
        f32(head),
        support,
        jnp.asarray(token_ids),
        temperature=temperatures,
        d_logprobs=0.0,
        d_entropy=1.0,
    )
    assert_gradient(d_hidden, d_logits @ head)


@OPTIMIZED
@FORMS
def test_head_rows_outside_every_support_get_exactly_no_gradient(form):
    hidden, head, *_ = case()
    support, token_ids = make_support([[1, 4, 6, 7], [4], [6, 8]], form), make_ids([6, 4, 8])
    padded = np.concatenate([head, np.full((3, D), 7.0)])
    (logprobs, _), (_, d_head) = pull(f32(hidden), f32(padded), support, token_ids)
    d_head = np.asarray(d_head)
    kept = [1, 4, 6, 7, 8]
    assert not np.delete(d_head, kept, axis=0).any()
    assert d_head[kept].any(axis=1).all()
    # Padding of the head changes nothing else.
    (expected, _), _ = pull(f32(hidden), f32(head), support, token_ids)
    np.testing.assert_array_equal(logprobs, expected)


@FORMS
def test_a_support_of_one_has_log_probability_0_and_no_gradient(form):
    hidden, head, *_ = case()
    support, token_ids = make_support([[3], [18], [0, 1, 2, 5, 6]], form), make_ids([3, 18, 5])
    (logprobs, _), (d_hidden, _) = pull(f32(hidden), f32(head), support, token_ids, temperature=0.7)
    assert logprobs[:2].tolist() == [0.0, 0.0]
    assert not np.asarray(d_hidden)[:2].any()
    assert np.asarray(d_hidden)[2].all()


@OPTIMIZED
@FORMS
def test_nothing_outside_the_support_matters(form):
    """P73: NaN, infinities and huge logits there change no value and no gradient, bit for bit."""
    hidden, head, lists, token_ids, temperatures = case()
    support, keep = make_support(lists, form), keep_of(lists)
    clean = np.asarray(hidden @ head.T, np.float32)

    def run(logits):
        arguments = support, jnp.asarray(token_ids), f32(temperatures)
        return pulled_from_logits(jnp.asarray(logits), *arguments, jnp.ones(NUM_ROWS))

    values, gradient = run(clean)
    for junk in (np.nan, np.inf, -np.inf, 3e38, 100.0):
        other_values, other_gradient = run(np.where(keep, clean, np.float32(junk)))
        np.testing.assert_array_equal(other_values, values)
        np.testing.assert_array_equal(other_gradient, gradient)
    assert np.isfinite(gradient).all()


@OPTIMIZED
@FORMS
def test_a_token_outside_its_support(form):
    hidden, head, *_ = case()
    support, token_ids = make_support([[1, 4, 6, 7], [4], [6, 8]], form), make_ids([5, 0, 8])
    (logprobs, _), (d_hidden, d_head) = pull(f32(hidden), f32(head), support, token_ids)
    assert np.isneginf(logprobs[:2]).all()
    assert np.isfinite(logprobs[2])
    assert not np.asarray(d_hidden)[:2].any()
    assert not np.asarray(d_head)[[1, 4, 7, 5, 0]].any()
    assert np.asarray(d_hidden)[2].any()
    ones = jnp.ones(NUM_ROWS)
    masked, _ = pulled_from_logits(f32(hidden @ head.T), support, token_ids, ones, ones)
    np.testing.assert_array_equal(np.isneginf(masked[:3]), [True, True, False])


@FORMS
@pytest.mark.parametrize("token_id", [-1, V, V + 1])
def test_ids_that_no_token_has_lie_outside(form, token_id):
    hidden, head, lists, *_ = case()
    ids = jnp.full(NUM_ROWS, token_id, jnp.int32)
    (logprobs, _), _ = pull(f32(hidden), f32(head), make_support(lists, form), ids)
    assert np.isneginf(logprobs).all()


@FORMS
def test_empty_supports_have_finite_gradients(form):
    """Padding: no value to speak of, and nothing that could spoil a sum with weight 0."""
    hidden, head, *_ = case()
    support, token_ids = make_support([[], [1, 4, 6, 7], []], form), make_ids([0, 4, 9])
    is_scored = np.arange(NUM_ROWS) == 1
    (_, entropy), (d_hidden, d_head) = pull(
        f32(hidden), f32(head), support, token_ids, d_logprobs=is_scored, d_entropy=1.0
    )
    assert np.isfinite(d_hidden).all()
    assert np.isfinite(d_head).all()
    assert np.asarray(d_hidden)[1].any()
    assert not np.asarray(d_hidden)[~is_scored].any()
    assert not np.asarray(d_head)[[0, 9]].any()
    assert not np.asarray(entropy)[~is_scored].any()


def test_packed_is_compact():
    hidden, head, lists, token_ids, temperatures = case()

    def run(form):
        support = make_support(lists, form)
        (logprobs, _), gradients = pull(
            f32(hidden), f32(head), support, jnp.asarray(token_ids), temperature=temperatures
        )
        return logprobs, *gradients

    for one, other in zip(run("compact"), run("packed"), strict=True):
        assert_gradient(one, other)


@OPTIMIZED
@FORMS
def test_one_temperature_or_one_per_row(form):
    hidden, head, lists, token_ids, _ = case()
    arguments = f32(hidden), f32(head), make_support(lists, form), jnp.asarray(token_ids)

    @jax.jit
    def run(*arguments):
        temperatures = ({"temperature": 0.6}, {"temperature": jnp.full(NUM_ROWS, 0.6)}, {})
        return [support_log_probs(*arguments, **options) for options in temperatures]

    one, each, default = run(*arguments)
    np.testing.assert_array_equal(one, each)
    assert (np.asarray(default) != np.asarray(one))[np.array([len(row) > 1 for row in lists])].all()


@FORMS
def test_leading_axes(form):
    hidden, head, lists, token_ids, temperatures = case()
    support, ids = make_support(lists, form), jnp.asarray(token_ids)
    (flat, _), _ = pull(f32(hidden), f32(head), support, ids, temperature=temperatures)
    grid = jax.jit(support_log_probs)(
        f32(hidden).reshape(4, 6, D),
        f32(head),
        support.reshape(4, 6),
        ids.reshape(4, 6),
        temperature=f32(temperatures).reshape(4, 6),
    )
    np.testing.assert_allclose(np.asarray(grid).reshape(-1), flat, atol=tolerances.LOGPROB)


@FORMS
def test_jit_is_no_jit(form):
    hidden, head, lists, token_ids, temperatures = case()
    arguments = (f32(hidden), f32(head), make_support(lists, form), jnp.asarray(token_ids))
    run = functools.partial(support_scores, temperature=f32(temperatures))
    eager, jitted = run(*arguments), jax.jit(run)(*arguments)
    np.testing.assert_allclose(jitted.logprobs, eager.logprobs, atol=tolerances.LOGPROB)
    np.testing.assert_allclose(jitted.entropy, eager.entropy, atol=tolerances.LOGPROB)


@FORMS
def test_bfloat16_inputs_accumulate_in_float32(form):
    hidden, head, lists, token_ids, temperatures = case()
    low = [jnp.asarray(x).astype(jnp.bfloat16) for x in (hidden.astype(np.float32), head.astype(np.float32))]
    exact = [np.asarray(x.astype(jnp.float32), np.float64) for x in low]
    support, keep = make_support(lists, form), keep_of(lists)
    (values, _), gradients = pull(*low, support, jnp.asarray(token_ids), temperature=temperatures)
    assert values.dtype == jnp.float32
    lp = oracle.log_probs(exact[0] @ exact[1].T, keep, temperatures)
    expected = np.take_along_axis(lp, token_ids[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(values, expected, atol=tolerances.LOGPROB)
    _, d_hidden, d_head = right_gradients(*exact, keep, token_ids, temperatures, np.ones(NUM_ROWS))
    for actual, right in zip(gradients, (d_hidden, d_head), strict=True):
        assert actual.dtype == jnp.bfloat16
        error = np.abs(np.asarray(actual.astype(jnp.float32)) - right).max()
        assert error < 4 * tolerances.BFLOAT16_GRADIENT * np.abs(right).max()


@jax.jit
def value_and_slope(logits, support, token_ids, temperature):
    """Of one row of logits."""
    score = functools.partial(masked_log_probs, support=support, token_ids=token_ids, temperature=temperature)
    values, pullback = jax.vjp(score, logits)
    return values[0], pullback(jnp.ones(1))[0][0]


def of_one_row(logits, token_id, temperature=1.0):
    """Log-probability of an id on the support of the ids below `len(logits)`, of four; and its gradient there."""
    size = len(logits)
    row = np.append(np.asarray(logits, np.float32), np.full(4 - size, 5, np.float32))
    support = Support.from_lists([range(size)], 4, width=4)
    value, slope = value_and_slope(row[None], support, np.array([token_id], np.int32), np.float32(temperature))
    assert not slope[size:].any()
    return float(value), np.asarray(slope)[:size]


def test_the_support_is_what_makes_the_ratio():
    """P31."""
    old, new = np.array([[2, 1, 0, -1]], np.float32), np.array([[1.5, 1.2, 3, 0]], np.float32)
    (before, _), (after, slope) = of_one_row(old[0, :2], 1), of_one_row(new[0, :2], 1)
    assert before == pytest.approx(-1.3132616875, abs=tolerances.LOGPROB)
    assert after == pytest.approx(-0.8543552445, abs=tolerances.LOGPROB)
    assert np.exp(after - before) == pytest.approx(1.5823426567, abs=tolerances.LOGPROB)
    np.testing.assert_allclose(slope, [-0.5744425168, 0.5744425168], atol=tolerances.GRADIENT)
    identity, token = np.eye(4, dtype=np.float32), np.array([1], np.int32)
    on_support = jax.jit(support_scores)(old, identity, Support.from_lists([[0, 1]], 4), token)
    assert float(on_support.entropy[0]) == pytest.approx(0.5822031089, abs=tolerances.LOGPROB)
    full = jax.jit(full_scores)(np.concatenate([old, new]), identity, np.array([1, 1], np.int32))
    assert float(full.entropy[0]) == pytest.approx(0.9475369640, abs=tolerances.LOGPROB)
    assert float(full.logprobs[1]) == pytest.approx(-2.1634035378, abs=tolerances.LOGPROB)


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [
        pytest.param([1, 0], 0.6, -0.1730079889, id="P34"),
        pytest.param([1, 0], 1.0, -0.3132616875, id="P34 untempered"),
        pytest.param([2, 1, 0], 0.5, -0.1429316285, id="P35"),
    ],
)
def test_the_temperature_belongs_on_the_logits(logits, temperature, expected):
    value, _ = of_one_row(logits, 0, temperature)
    assert value == pytest.approx(expected, abs=tolerances.LOGPROB)


@pytest.mark.parametrize(
    ("temperature", "expected"), [(1.0, -0.2689414214), (0.5, -0.2384058440), (2.0, -0.1887703344)]
)
def test_the_gradient_holds_the_temperature(temperature, expected):
    """P51."""
    _, slope = of_one_row([1, 0], 0, temperature)
    assert -slope[0] == pytest.approx(expected, abs=tolerances.GRADIENT)


def test_a_large_masked_logit():
    """P73."""
    support = Support.from_lists([[0, 1]] * 3, 3)

    @jax.jit
    def log_probs(x):
        return masked_log_probs(jnp.tile(x, (3, 1)), support, jnp.arange(3, dtype=jnp.int32))

    x = jnp.array([1.0, 1, 100])
    np.testing.assert_allclose(log_probs(x), [-0.6931471806, -0.6931471806, -np.inf], atol=tolerances.LOGPROB)
    # P74: forward and reverse mode.
    for jacobian in (jax.jacrev(log_probs)(x), jax.jacfwd(log_probs)(x)):
        np.testing.assert_allclose(jacobian, [[0.5, -0.5, 0], [-0.5, 0.5, 0], [0, 0, 0]], atol=tolerances.GRADIENT)


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of every intermediate value, also inside nested jaxprs."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {variable.aval.shape for variable in equation.outvars if hasattr(variable.aval, "shape")}
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= shapes_in(inner)
    return found


def test_no_array_over_the_vocabulary_is_built():
    """Neither forward nor backward: only the head's own gradient, [U, D], has the vocabulary in its shape."""
    U, B, T, W = 1013, 3, 4, 7
    cells = jnp.tile(jnp.arange(W, dtype=jnp.int32), (B, T, 1))
    support = Support(cells, jnp.full((B, T), W, jnp.int32), None, U)

    def total(hidden, head, support, scores=support_log_probs):
        return scores(hidden, head, support, jnp.zeros((B, T), jnp.int32)).sum()

    arguments = (jnp.ones((B, T, D)), jnp.ones((U, D)), support)
    forward = shapes_in(jax.make_jaxpr(total)(*arguments).jaxpr)
    assert (gathered.block_size(D), D) in forward
    assert not [shape for shape in forward if U in shape]
    backward = shapes_in(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(*arguments).jaxpr)
    assert {shape for shape in backward if U in shape} <= {(U, D)}

    # The check has teeth: the route over full logits is seen.
    def dense(hidden, head, support, token_ids):
        return masked_log_probs(hidden @ head.T, support, token_ids)

    assert (B, T, U) in shapes_in(jax.make_jaxpr(functools.partial(total, scores=dense))(*arguments).jaxpr)


def test_full_scores_keep_to_their_chunks():
    """1000 rows go through 64 at a time, forward and backward."""
    U, rows = 1013, 1000

    @jax.jit
    def total(hidden, head):
        return full_scores(hidden, head, jnp.zeros(rows, jnp.int32)).logprobs.sum()

    shapes = shapes_in(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(jnp.ones((rows, D)), jnp.ones((U, D))).jaxpr)
    assert (64, U) in shapes
    assert not [shape for shape in shapes if U in shape and np.prod(shape) > 64 * U and shape != (U, D)]


def test_errors_name_what_does_not_fit():
    support = Support.from_lists([[0], [1]], V)
    ids = jnp.zeros(2, jnp.int32)
    with pytest.raises(
        ValueError, match=r"leading shapes must agree, got \(3,\) for the policy, \(2,\) for the support"
    ):
        support_log_probs(jnp.zeros((3, D)), jnp.zeros((V, D)), support, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"leading shapes must agree, got \(2, 1\)"):
        masked_log_probs(jnp.zeros((2, 1, V)), support, jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match=f"logits have {V - 1} columns, fewer than the support's {V} ids"):
        masked_log_probs(jnp.zeros((2, V - 1)), support, ids)
    with pytest.raises(ValueError, match=f"head has {V - 1} rows, fewer than the {V} ids of the vocabulary"):
        support_log_probs(jnp.zeros((2, D)), jnp.zeros((V - 1, D)), support, ids)


@OPTIMIZED
@FORMS
def test_rows_without_a_support_reach_no_gradient_whatever_they_hold(form):
    """DESIGN 2: what lies in cells that were not sampled changes nothing, bit for bit."""
    hidden, head, *_ = case()
    support, token_ids = make_support([[0, 2, 3, 6], [], [1, 4]], form), make_ids([2, 0, 4])
    assert (support.packed is None) == (form == "compact")
    options = {"d_logprobs": np.asarray(support.counts) > 0}
    _, clean = pull(f32(hidden), f32(head), support, token_ids, **options)
    _, dirty = pull(f32(hidden).at[1].set(jnp.nan), f32(head), support, token_ids, **options)
    for one, other in zip(clean, dirty, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_array_equal(one, other)


@OPTIMIZED
def test_a_greedy_temperature_tempers_nothing_as_in_the_sampler():
    support = Support.from_lists([[0, 1, 2]] * 2, 3)
    logits, token_ids = jnp.array([[1.0, 2.0, 0.0]] * 2), jnp.array([0, 1], jnp.int32)
    mixed = masked_log_probs(logits, support, token_ids, temperature=jnp.array([0.0, 0.5]))
    plain = masked_log_probs(logits, support, token_ids, temperature=1.0)
    half = masked_log_probs(logits, support, token_ids, temperature=0.5)
    np.testing.assert_array_equal(mixed, [plain[0], half[1]])


def test_temperatures_that_do_not_fit_are_refused():
    support = Support.from_lists([[0, 1]] * 4, 3).reshape(2, 2)
    logits, token_ids = jnp.zeros((2, 2, 3)), jnp.zeros((2, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"one number or have the .*shape \(2, 2\), got \(2,\)"):
        masked_log_probs(logits, support, token_ids, temperature=jnp.ones(2))
    with pytest.raises(ValueError, match=r"temperature must be at least 0, got -1\.0"):
        masked_log_probs(logits, support, token_ids, temperature=-1.0)


@OPTIMIZED
def test_head_rows_outside_every_support_reach_no_gradient():
    hidden, head, *_ = case()
    support, token_ids = make_support([[1, 2, 3], [4]], "compact"), make_ids([2, 4])

    def slope(head):
        return pull(f32(hidden), head, support, token_ids)[1][0]

    np.testing.assert_array_equal(slope(f32(head)), slope(f32(head).at[0].set(jnp.nan)))


@pytest.mark.parametrize(("num_devices", "form"), [(2, "compact"), (4, "packed")])
def test_a_sequence_cut_over_devices(num_devices, form, unchecked):
    """P30: masks are cut as labels are, so log-probabilities stay what they were; shapes that differ are refused."""
    hidden, head, lists, token_ids, _ = case()
    hidden, head = f32(hidden).reshape(3, 8, D), f32(head)
    support, tokens = make_support(lists, form).reshape(3, 8), jnp.asarray(token_ids).reshape(3, 8)
    run = jax.jit(lambda h, s, t: support_log_probs(h, head, s, t))
    whole = run(hidden, support, tokens)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("sequence",))
    along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "sequence"))
    cut = jax.device_put((hidden, support, tokens), along)
    found = run(*cut)
    assert found.sharding.num_devices == num_devices
    np.testing.assert_allclose(found, whole, rtol=tolerances.LOGPROB, atol=tolerances.LOGPROB)
    message = r"leading shapes must agree, got \(3, 4\) for the policy, \(3, 8\) for the support and \(3, 4\)"
    with pytest.raises(ValueError, match=message):
        support_log_probs(hidden[:, :4], head, support, tokens[:, :4])


def test_the_kernel_scores_as_the_plain_path():
    """Over two leading axes, a padded head, a temperature each, an empty support, and a token outside of its own."""
    hidden, head, lists, token_ids, temperatures = case()
    lists = [[], *lists[1:]]
    support = Support.from_lists(lists, V).reshape(4, 6)
    token_ids = jnp.asarray(token_ids).reshape(4, 6).at[1, 1].set(next(iter(set(range(V)) - set(lists[7]))))
    hidden, temperatures = f32(hidden).reshape(4, 6, D).at[0, 0].set(jnp.nan), f32(temperatures).reshape(4, 6)
    head = jnp.concatenate([f32(head), jnp.full((3, D), jnp.nan)])

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.value_and_grad, argnums=(1, 2), has_aux=True)
    def run(implementation, hidden, head):
        options = {"temperature": temperatures, "implementation": implementation}
        found = support_scores(hidden, head, support, token_ids, **options)
        loss = jnp.where(jnp.isfinite(found.logprobs), found.logprobs, 0.0).sum() + 0.3 * found.entropy.sum()
        return loss, found

    ((_, plain), plain_slopes), ((_, kernel), kernel_slopes) = (
        run(name, hidden, head) for name in ("xla", "interpret")
    )
    np.testing.assert_allclose(kernel.logprobs, plain.logprobs, atol=tolerances.LOGPROB)
    np.testing.assert_allclose(kernel.entropy, plain.entropy, atol=tolerances.LOGPROB)
    assert kernel.logprobs[1, 1] == kernel.logprobs[0, 0] == -jnp.inf
    for expected, found in zip(plain_slopes, kernel_slopes, strict=True):
        assert_gradient(found, np.asarray(expected))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_broken_promise_is_not_the_next_rows_trouble(implementation):
    """Counts beyond the cells: what the cells hold is scored, and rows do not run on into each other."""
    rng = np.random.default_rng(0)
    hidden, head = f32(rng.normal(size=(3, D))), f32(rng.normal(size=(V, D)))
    cells = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    kept = Support(jnp.asarray(cells), jnp.array([2, 2, 2], jnp.int32), None, V)
    broken = Support(jnp.asarray(cells), jnp.array([5, 2, 5], jnp.int32), None, V)
    token_ids = jnp.array([1, 3, 5], jnp.int32)
    expected = support_log_probs(hidden, head, kept, token_ids)
    found = support_log_probs(hidden, head, broken, token_ids, implementation=implementation)
    np.testing.assert_allclose(found, expected, atol=tolerances.LOGPROB)


def test_more_cells_than_can_be_counted(unchecked, monkeypatch):
    monkeypatch.setattr("jaxmask.kernels.dispatch._warned", set())
    device = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    monkeypatch.setattr("jaxmask.kernels.dispatch._device_of", lambda array, mesh: device)
    N, W, of = 2**20, 2048, jax.ShapeDtypeStruct
    support = Support(of((N, W), jnp.int32), of((N,), jnp.int32), None, V)
    with pytest.warns(RuntimeWarning, match="there are 2147483648 cells, and the kernel counts to"):
        jax.eval_shape(support_scores, of((N, 1), jnp.float32), of((V, 1), jnp.float32), support, of((N,), jnp.int32))


def test_no_rows_with_bits():
    support, none = Support.from_lists([[1, 2, 3]], V, width=1)[:0], jnp.zeros(0, jnp.int32)
    assert support_scores(jnp.zeros((0, D)), jnp.ones((V, D)), support, none).logprobs.shape == (0,)
    assert masked_log_probs(jnp.zeros((0, V)), support, none).shape == (0,)
    assert full_scores(jnp.zeros((0, D)), jnp.ones((V, D)), none).logprobs.shape == (0,)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_no_rows(implementation):
    support = Support(jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32), None, V)
    arguments = jnp.zeros((0, D)), jnp.ones((V, D)), support, jnp.zeros(0, jnp.int32)
    assert support_scores(*arguments, implementation=implementation).logprobs.shape == (0,)
    d_head = jax.grad(lambda head: support_log_probs(arguments[0], head, *arguments[2:]).sum())(arguments[1])
    assert not d_head.any()


def test_log_probabilities_of_every_id():
    """Those of the cells, normalised over the whole support; the lowest ids of supports wider than their cells."""
    hidden, head, lists, token_ids, temperatures = case()
    right = oracle.log_probs(hidden @ head.T, keep_of(lists), temperatures)
    for form in ("compact", "packed"):
        support = make_support(lists, form)
        arguments = f32(hidden), f32(head), support, jnp.asarray(token_ids)
        found = jax.jit(functools.partial(support_scores, return_id_logprobs=True))(
            *arguments, temperature=f32(temperatures)
        ).id_logprobs
        cells = np.asarray(support.cells())
        expected = np.take_along_axis(right, np.where(cells, support.token_ids, 0), axis=1)
        np.testing.assert_allclose(np.asarray(found)[cells], expected[cells], atol=tolerances.LOGPROB)
        assert (np.asarray(found)[~cells] == -np.inf).all()
    assert support_scores(*arguments).id_logprobs is None


@OPTIMIZED
def test_a_policy_is_at_no_distance_from_itself():
    """P52: KL 0, and its gradient; the reference's log-probabilities are the policy's, bit for bit."""
    hidden, head, lists, token_ids, temperatures = case()
    support = make_support(lists, "packed")
    reference = Reference(f32(hidden), f32(head))

    # Op by op: a compiler that fuses the two heads differently breaks the equality of bits.
    def kl(hidden):
        options = {"temperature": f32(temperatures), "reference": reference}
        scores = support_scores(hidden, f32(head), support, jnp.asarray(token_ids), **options)
        return scores.kl.sum(), scores

    (value, scores), gradient = jax.value_and_grad(kl, has_aux=True)(f32(hidden))
    assert value == 0
    np.testing.assert_array_equal(scores.ref_logprobs, scores.logprobs)
    np.testing.assert_allclose(gradient, np.zeros(hidden.shape), atol=tolerances.GRADIENT)


def test_supports_of_one_id_read_no_row_of_the_head():
    hidden, head = f32(np.ones((3, D))), f32(np.ones((V, D))).at[7].set(jnp.nan)
    support = Support.from_lists([[7], [1, 2], [7]], V)
    assert support_log_probs(hidden, head, support, jnp.array([7, 1, 7], jnp.int32)).tolist() == [
        0,
        pytest.approx(-np.log(2), abs=tolerances.LOGPROB),
        0,
    ]


@OPTIMIZED
def test_rows_that_fit_their_cells_never_see_the_vocabulary():
    """Packed bits are there, and no row needs them: rows of the head outside the supports are not read."""
    support = Support.concatenate([Support.from_lists([[1, 2], [3, 5]], V), Support.from_lists([range(9)], V, width=2)])
    support = support[:2]
    assert support.packed is not None
    head = f32(np.random.default_rng(0).normal(size=(V, D)))
    others = jnp.array([i for i in range(V) if i not in (1, 2, 3, 5)])

    @jax.jit
    @jax.value_and_grad
    def run(head):
        return support_log_probs(jnp.ones((2, D)), head, support, jnp.array([1, 3], jnp.int32)).sum()

    clean, dirty = (run(array) for array in (head, head.at[others].set(jnp.nan)))
    assert clean[0] == dirty[0]
    np.testing.assert_array_equal(clean[1], dirty[1])


def test_a_real_vocabulary_against_float64():
    """Supports as rollouts have them, and one of 3000 ids beside cells for 96; values, entropy and both gradients."""
    vocab_size = 151_936
    rng = np.random.default_rng(vocab_size)
    sizes = np.concatenate([[3000, 97, 96, 0], np.ones(30, int), rng.geometric(0.1, 40)])
    lists = [np.sort(rng.choice(vocab_size, min(size, 97) if size < 3000 else size, replace=False)) for size in sizes]
    token_ids = np.array([rng.choice(ids) if len(ids) else 0 for ids in lists], np.int32)
    hidden, head = rng.normal(size=(len(lists), 16)), rng.normal(size=(vocab_size, 16))
    hidden, head = (x.astype(np.float32).astype(np.float64) for x in (hidden, head))
    support = Support.from_lists([ids.tolist() for ids in lists], vocab_size, width=96)
    weights = np.where(sizes > 0, rng.normal(size=len(lists)), 0)

    def total(hidden, head):
        scores = support_scores(hidden, head, support, jnp.asarray(token_ids), temperature=0.8)
        return (f32(weights) * jnp.where(support.counts > 0, scores.logprobs, 0.0)).sum(), scores

    (_, scores), found = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(f32(hidden), f32(head))
    d_hidden, d_head = np.zeros(hidden.shape), np.zeros(head.shape)
    for row, ids in enumerate(lists):
        if len(ids) == 0:
            continue
        x = head[ids] @ hidden[row] / 0.8
        lp = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        np.testing.assert_allclose(scores.logprobs[row], lp[ids == token_ids[row]][0], atol=tolerances.LOGPROB)
        np.testing.assert_allclose(scores.entropy[row], -(np.exp(lp) * lp).sum(), atol=tolerances.LOGPROB)
        d_x = weights[row] * ((ids == token_ids[row]) - np.exp(lp)) / 0.8
        d_hidden[row] = d_x @ head[ids]
        d_head[ids] += d_x[:, None] * hidden[row]
    for one, right in zip(found, (d_hidden, d_head), strict=True):
        assert_gradient(one, right)
    outside = np.setdiff1d(np.arange(vocab_size), np.concatenate(lists).astype(int))
    assert not np.asarray(found[1])[outside].any(), "exactly 0 outside the supports"


def test_a_tied_head_gets_the_gradient_of_both_its_uses():
    hidden, head, lists, token_ids, _ = case()
    support = make_support(lists, "compact")
    rows = jnp.asarray(token_ids)

    def total(embedding, head):
        return support_log_probs(f32(hidden) + embedding[rows], head, support, rows).sum()

    @jax.jit
    def tied_and_apart(array):
        return jax.grad(lambda both: total(both, both))(array), jax.grad(total, argnums=(0, 1))(array, array)

    tied, apart = tied_and_apart(f32(head))
    assert_gradient(tied, np.asarray(apart[0] + apart[1]))


def test_a_soft_cap_flattens_the_logits():
    """x -> c tanh(x / c), before the temperature: [30, 10, -10] with a cap of 10, T = 2."""
    support, head = Support.from_lists([[0, 1, 2]], 3), jnp.eye(3)
    found = support_log_probs(jnp.array([[30.0, 10, -10]]), head, support, jnp.zeros(1, jnp.int32), temperature=2.0)
    capped = support_log_probs(
        jnp.array([[30.0, 10, -10]]), head, support, jnp.zeros(1, jnp.int32), temperature=2.0, logit_softcap=10.0
    )
    x = 10 * np.tanh([3, 1, -1]) / 2
    assert float(found[0]) == pytest.approx(-np.log1p(np.exp(-10) + np.exp(-20)), abs=tolerances.LOGPROB)
    assert float(capped[0]) == pytest.approx(x[0] - np.log(np.exp(x).sum()), abs=tolerances.LOGPROB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_softcap": 0.0}, r"logit_softcap must be > 0 and finite, or None, got 0\.0"),
        ({"logit_softcap": float("nan")}, "logit_softcap must be > 0 and finite"),
        (
            {"reference": Reference(jnp.ones((3, D)), jnp.ones((V, D)))},
            r"reference must have the tokens .* got hidden \(3, 5\)",
        ),
        ({"reference": Reference(jnp.ones((2, D)), jnp.ones((V + 1, D)))}, rf"got .* and head \({V + 1}, {D}\)"),
        ({"reference": Reference(jnp.ones((2, D + 1)), jnp.ones((V, D)))}, rf"one width, got hidden \(2, {D + 1}\)"),
        ({"loss_mask": jnp.ones(3, bool)}, r"loss_mask must have the leading shape \(2,\), got \(3,\)"),
    ],
)
def test_settings_out_of_range_are_named(options, message, unchecked):
    support = Support.from_lists([[0], [1]], V)
    with pytest.raises(ValueError, match=message):
        support_scores(jnp.zeros((2, D)), jnp.zeros((V, D)), support, jnp.zeros(2, jnp.int32), **options)
    with pytest.raises(ValueError, match=message):
        full_scores(jnp.zeros((2, D)), jnp.zeros((V, D)), jnp.zeros(2, jnp.int32), **options)


@jax.jit
def all_scores(hidden, head, ref_head, support, token_ids):
    """On supports beside a reference, and from logits."""
    scores = support_scores(hidden, head, support, token_ids, reference=Reference(hidden, ref_head))
    return scores, masked_log_probs(hidden @ head.T, support, token_ids)


@OPTIMIZED
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_logit_of_a_kept_id_is_seen_in_every_number(bad):
    """At an id that was not drawn: the whole row says NaN, never a plausible number; other rows are what they were."""
    lists, token_ids = [[1, 3, 5], [2, 4], [0, 2, 4]], jnp.array([1, 2, 4], jnp.int32)
    hidden = f32(np.random.default_rng(0).normal(size=(3, D)))
    head = f32(np.random.default_rng(1).normal(size=(V, D)))
    broken = head.at[5].set(bad)
    for width in (None, 1):
        support = Support.from_lists(lists, V, width=width)
        right, _ = all_scores(hidden, head, head, support, token_ids)
        found, masked = all_scores(hidden, broken, head, support, token_ids)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            np.testing.assert_array_equal(one[1:], other[1:])
        assert np.isnan([found.logprobs[0], found.entropy[0], found.kl[0]]).all()
        assert np.isnan(masked[0])
    assert np.isnan(jax.jit(full_scores)(hidden, broken, token_ids).logprobs).all()


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1))
def twice_entropy_and_kl(hidden, head, support, weights):
    reference = Reference(jnp.ones((1, D)), jnp.ones((V, D)))
    scores = support_scores(hidden, head, support, jnp.array([3], jnp.int32), reference=reference)
    return 2 * (weights * jnp.stack([scores.entropy[0], scores.kl[0]])).sum()


@pytest.mark.parametrize("width", [None, 1])
@pytest.mark.parametrize("name", ["entropy", "kl"])
def test_gradients_of_huge_logits_are_finite(name, width):
    """A weight of 0 times a logit of -3e38, times a coefficient above 1."""
    support = Support.from_lists([[1, 3, 5]], V, width=width)
    head = jnp.zeros((V, D)).at[3, 0].set(3e38).at[5, 0].set(-3e38)

    weights = f32([name == "entropy", name == "kl"])
    found, gradients = twice_entropy_and_kl(jnp.ones((1, D)), head, support, weights)
    assert float(found) == pytest.approx(0 if name == "entropy" else 2 * np.log(3), abs=tolerances.LOGPROB)
    assert not any(np.asarray(gradient).any() for gradient in gradients)


def test_gradients_of_chunks_that_are_not_full():
    """70 rows over the vocabulary, 64 and 6; against the closed form."""
    rng = np.random.default_rng(0)
    hidden, head, token_ids = rng.normal(size=(70, D)), rng.normal(size=(V, D)), rng.integers(0, V, 70)
    temperature, weights = rng.uniform(0.5, 2, 70), rng.normal(size=70)

    def total(hidden, head):
        scores = full_scores(
            hidden, head, jnp.asarray(token_ids, jnp.int32), temperature=temperature.astype(np.float32)
        )
        return (f32(weights) * scores.logprobs).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(f32(hidden), f32(head))
    _, d_hidden, d_head = right_gradients(hidden, head, np.ones((70, V), bool), token_ids, temperature, weights)
    for found, right in zip(gradients, (d_hidden, d_head), strict=True):
        assert_gradient(found, right)


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        full_scores(jnp.ones((1, D)), jnp.ones((V, D)), jnp.zeros(1, jnp.int32), vocab_size=0)
