import exact
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rows
import tolerances

from jaxmask import SamplingBatch, filters, mass


def column(*values, dtype=np.float32):
    return jnp.asarray(np.array(values, dtype))


def top_p_length(z, length, top_p):
    """What top-p leaves of the first `length` columns, which are the whole row."""
    running = mass.running(filters.prefix(z, length))
    nucleus, is_reached = filters.top_p_length(running, running[:, -1], top_p)
    assert bool(is_reached.all())
    return jnp.where(top_p < 1, jnp.minimum(nucleus, length), length)


def kept_length(z, min_p, top_k, top_p):
    """What all filters leave of whole rows in canonical order."""
    return top_p_length(z, filters.top_k_length(filters.min_p_length(z, min_p), top_k), top_p)


def test_temper_subtracts_the_maximum_before_it_divides():
    """P11: 11.0625 / 1e-2 is beyond float16 and harmless here; -inf stays, and nothing overflows to it."""
    logits = jnp.array([[11.0625, 2.955078125, 2.875, -jnp.inf], [3e38, -3e38, 0, -jnp.inf]])
    z = filters.temper(logits, logits.max(axis=1), column(0.01, 0.01))
    np.testing.assert_allclose(np.asarray(z)[0], [0, -810.7421875, -818.75, -np.inf], rtol=tolerances.LOGPROB)
    lowest = np.finfo(np.float32).min
    assert z[1].tolist() == [0, lowest, lowest, -np.inf]


def test_temper_of_greedy_and_of_empty_rows():
    logits = jnp.array([[2.0, 1.0], [-jnp.inf, -jnp.inf]])
    z = filters.temper(logits, logits.max(axis=1), column(0.0, 0.0))
    assert z.tolist() == [[0, -1], [-np.inf, -np.inf]]


def test_min_p_keeps_what_is_at_least_that_share_of_the_likeliest():
    # exp(-1.6) = 0.2019, exp(-1.62) = 0.1979.
    z = jnp.tile(jnp.array([[0, -1.6, -1.62, -70, -jnp.inf]]), (5, 1))
    min_p = column(0.0, 1e-30, 0.2, 0.5, 1.0)
    assert filters.min_p_length(z, min_p).tolist() == [4, 3, 2, 1, 1]
    survives = filters.survives_min_p(z, min_p)
    assert survives.tolist() == [[column < length for column in range(5)] for length in (4, 3, 2, 1, 1)]


def test_min_p_in_any_order_of_the_columns():
    z = jnp.array([[-jnp.inf, -1.62, 0, -70, -1.6], [-jnp.inf] * 5])
    assert filters.survives_min_p(z, column(0.2, 0.0)).tolist() == [[False, False, True, False, True], [False] * 5]


def test_top_k_is_exact_where_there_are_k():
    length = column(5, 3, 0, dtype=np.int32)
    assert filters.top_k_length(length, column(4, 4, 4, dtype=np.int32)).tolist() == [4, 3, 0]


@pytest.mark.parametrize(
    ("top_p", "length", "expected"),
    [
        (0.79, 4, 2),
        (0.81, 4, 3),
        (1.0, 4, 4),
        (1e-8, 4, 1),
        (1e-45, 4, 1),
        (0.5, 4, 1),
        # Of the first two, 0.5 / 0.8 = 0.625: each filter sees the survivors of the one before.
        (0.62, 2, 1),
        (0.63, 2, 2),
        (0.9, 1, 1),
        (0.9, 0, 0),
    ],
)
def test_top_p_is_the_shortest_prefix_that_reaches_its_share(top_p, length, expected):
    """P03, P06, P08."""
    z = jnp.asarray(np.log(np.array([[0.5, 0.3, 0.1, 0.1]])) - np.log(0.5), jnp.float32)
    assert top_p_length(z, column(length, dtype=np.int32), column(top_p)).tolist() == [expected]


def test_top_p_on_an_exact_boundary():
    """Eight equal tokens: n / 8 is exact in float32, so n tokens reach it and no more are kept."""
    z = jnp.zeros((7, 8))
    top_p = column(*(n / 8 for n in range(1, 8)))
    assert top_p_length(z, jnp.full(7, 8, jnp.int32), top_p).tolist() == list(range(1, 8))


def test_a_unit_of_mass_decides():
    """Half of 2 n + 1 units is n + 1, where n are not enough."""
    running = exact.of_integers([[5, 10], [5, 11], [2**40, 2**41 + 1]])
    length, is_reached = filters.top_p_length(running, running[:, -1], column(0.5, 0.5, 0.5))
    assert length.tolist() == [1, 2, 2]
    assert is_reached.tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("top_p", "length", "is_reached"),
    [(0.05, 1, True), (0.5, 1, True), (0.51, 2, True), (0.75, 2, True), (0.78, 3, True), (0.8, 3, False)],
)
def test_top_p_of_a_mass_beyond_the_columns(top_p, length, is_reached):
    """Columns of 50 %, 25 % and 4 % of all that survived; the rest lies elsewhere."""
    running = exact.of_integers([[50 * 2**31, 75 * 2**31, 79 * 2**31]])
    nucleus = filters.top_p_length(running, exact.of_integers([100 * 2**31]), column(top_p))
    assert [part.tolist() for part in nucleus] == [[length], [is_reached]]


def test_all_filters_against_the_oracle():
    grid = [p for p in rows.filter_grid(12) if p.temperature > 0]
    logits = rows.adversarial(np.random.default_rng(0), len(grid), 12)
    truth = oracle.truth(logits, grid)
    ordered = jnp.asarray(np.take_along_axis(oracle.finite_or_excluded(logits), truth.order, axis=1))
    batch = SamplingBatch.from_params(grid, vocab_size=12)
    z = filters.temper(ordered, ordered[:, 0], batch.temperature)
    length = np.asarray(kept_length(z, batch.min_p, batch.top_k, batch.top_p))
    assert ((truth.low <= length) & (length <= truth.high)).all()
    np.testing.assert_array_equal(length[truth.is_exact], truth.length[truth.is_exact])
    assert truth.is_exact.mean() > 0.8
    np.testing.assert_array_equal(length == 0, ~np.isfinite(logits).any(axis=1))
    survivors = np.minimum(filters.min_p_length(z, batch.min_p), batch.top_k)
    settings = zip(np.asarray(z), survivors, grid, strict=True)
    assert length.tolist() == [exact.nucleus_length(row, int(count), p.top_p) for row, count, p in settings]


def test_prefix():
    assert filters.is_prefix(jnp.zeros((3, 3)), column(0, 2, 5, dtype=np.int32)).tolist() == [
        [False, False, False],
        [True, True, False],
        [True, True, True],
    ]
    z = jnp.array([[0.0, -1.0, -jnp.inf], [0.0, -1.0, -2.0]])
    no = -np.inf
    assert filters.prefix(z, column(1, 2, dtype=np.int32)).tolist() == [[0, no, no], [0, -1, no]]
    assert filters.prefix(z, column(0, 3, dtype=np.int32)).tolist() == [[no, no, no], [0, -1, -2]]
