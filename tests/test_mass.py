import functools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmask import filters, mass, shards

# XLA's exp in float32 is right to two units in the last place, relative.
EXP_ERROR = 2.0**-22

LENGTHS = (1, 7, 63, 64, 65, 1000, mass.MAX_COLUMNS, 151_936, mass.MAX_TERMS)
WORDS = (0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
# Every pair of these words: equal highs, full lows.
ADVERSARIAL = [high * 2**32 + low for high in WORDS for low in WORDS]


total_in_jit, running_in_jit = jax.jit(mass.total), jax.jit(mass.running)


def tempered(rng: np.random.Generator, num_rows: int, num: int) -> np.ndarray:
    """Rows as `filters.temper` leaves them: flat and peaked ones, with the largest at 0 and some -inf."""
    x = rng.normal(size=(num_rows, num)) * np.array([0.01, 1.0, 10.0])[np.arange(num_rows) % 3, None]
    x[rng.random(x.shape) < 0.1] = -np.inf
    x[:, rng.integers(num)] = 0
    return np.minimum(x - x.max(axis=1, keepdims=True), 0).astype(np.float32)


@pytest.mark.parametrize("num", LENGTHS)
def test_total_is_the_exact_sum(num):
    z = tempered(np.random.default_rng(num), 3, num)
    total = exact.integers(total_in_jit(jnp.asarray(z)))
    assert total.tolist() == exact.units(z).sum(axis=1).tolist()
    # Cutting takes less than a unit of each weight and adds nothing.
    weights = np.exp(z.astype(np.float64)).sum(axis=1)
    as_float = total.astype(np.float64) * exact.UNIT
    assert (as_float <= weights * (1 + EXP_ERROR)).all()
    assert (as_float >= weights * (1 - EXP_ERROR) - num * exact.UNIT).all()


@pytest.mark.parametrize("num", LENGTHS)
def test_the_largest_total_of_each_length_does_not_overflow(num):
    assert exact.integers(total_in_jit(jnp.zeros((3, num)))).tolist() == [num * 2**36] * 3


def test_total_by_hand():
    """exp(-24) 2^36 = 2.59, exp(-25) 2^36 = 0.95; exp(-24.9) 2^36 = 1.05."""
    z = jnp.array([[-24.0, -np.inf, -24.9], [-25.0, -25.0, -25.0], [0.0, -24.0, -24.0], [-1e30, -np.inf, -np.inf]])
    assert exact.integers(mass.total(z)).tolist() == [3, 0, 2**36 + 4, 0]


def test_what_is_excluded_weighs_nothing():
    z = tempered(np.random.default_rng(0), 3, 500)
    apart = np.full((3, 1000), -np.inf, np.float32)
    apart[:, ::2] = z
    assert exact.integers(total_in_jit(jnp.asarray(apart))).tolist() == exact.units(z).sum(axis=1).tolist()
    running = exact.integers(running_in_jit(jnp.asarray(apart)))
    np.testing.assert_array_equal(running[:, 1::2], running[:, ::2])
    assert exact.integers(total_in_jit(jnp.full((3, 1000), -jnp.inf))).tolist() == [0, 0, 0]


@pytest.mark.parametrize("num", [1000, 151_936])
def test_the_order_of_a_row_changes_nothing(num):
    rng = np.random.default_rng(1)
    z = tempered(rng, 3, num)
    total = exact.integers(total_in_jit(jnp.asarray(z))).tolist()
    for order in (np.arange(num)[::-1], np.argsort(z[1], kind="stable"), rng.permutation(num)):
        assert exact.integers(total_in_jit(jnp.asarray(z[:, order]))).tolist() == total


@pytest.mark.parametrize("num", [1, 7, 63, 64, 65, 1000, mass.MAX_COLUMNS])
def test_running_mass_is_the_exact_running_sum(num):
    z = tempered(np.random.default_rng(num), 3, num)
    expected = np.cumsum(exact.units(z), axis=1)
    assert exact.integers(running_in_jit(jnp.asarray(z))).tolist() == expected.tolist()
    assert exact.integers(total_in_jit(jnp.asarray(z))).tolist() == expected[:, -1].tolist()
    ones = exact.integers(running_in_jit(jnp.zeros((3, num))))
    assert ones.tolist() == [[2**36 * (column + 1) for column in range(num)]] * 3


def test_masses_out_of_jit():
    """Operation by operation, where nothing is fused."""
    z = tempered(np.random.default_rng(6), 3, 100)
    expected = np.cumsum(exact.units(z), axis=1)
    assert exact.integers(mass.running(jnp.asarray(z))).tolist() == expected.tolist()
    assert exact.integers(mass.total(jnp.asarray(z))).tolist() == expected[:, -1].tolist()


@pytest.mark.parametrize("num", [7, 65, 1000, mass.MAX_COLUMNS])
def test_masses_inside_a_larger_program(num):
    """XLA may compute an exponential anew in each fusion: none may see another last bit of it."""

    @jax.jit
    def program(logits, temperature, length):
        z = filters.temper(logits, logits.max(axis=1), temperature)
        kept = filters.prefix(z, length)
        probabilities = jnp.exp(z) / jnp.exp(z).sum(axis=1, keepdims=True)
        masses = mass.total(z), mass.total(kept), mass.running(kept), mass.total(jnp.where(z < -1.0, z, -jnp.inf))
        return z, masses, probabilities.max(axis=1)

    rng = np.random.default_rng(num)
    logits = (3 * rng.normal(size=(5, num))).astype(np.float32)
    length = rng.integers(0, num + 1, 5).astype(np.int32)
    temperature = jnp.array([0.3, 0.7, 1.0, 1.3, 2.0])
    z, (total, kept, running, low), _ = program(jnp.asarray(logits), temperature, jnp.asarray(length))
    weights = exact.units(np.asarray(z))
    in_prefix = np.where(np.arange(num) < length[:, None], weights, 0)
    assert exact.integers(total).tolist() == weights.sum(axis=1).tolist()
    assert exact.integers(kept).tolist() == in_prefix.sum(axis=1).tolist()
    assert exact.integers(running).tolist() == np.cumsum(in_prefix, axis=1).tolist()
    assert exact.integers(running[:, -1]).tolist() == exact.integers(kept).tolist()
    assert exact.integers(low).tolist() == np.where(np.asarray(z) < -1, weights, 0).sum(axis=1).tolist()


def test_uneven_parts_add_up_to_the_whole():
    """As devices would: each hands over what it holds, and all go on with the sums."""
    z = jnp.asarray(tempered(np.random.default_rng(2), 3, 1000))
    parts = [z[:, start:stop] for start, stop in ((0, 7), (7, 300), (300, 301), (301, 1000))]
    offers = []

    def offer(limb):
        offers.append(limb)
        return limb

    for part in parts:
        mass.total(part, offer)
    num_limbs = len(offers) // len(parts)
    sums = [functools.reduce(jnp.add, offers[limb::num_limbs]) for limb in range(num_limbs)]
    whole = exact.integers(total_in_jit(z)).tolist()
    for part in parts:
        remaining = iter(sums)
        # Bound here: each part takes every sum once.
        assert exact.integers(mass.total(part, lambda _, sums=remaining: next(sums))).tolist() == whole


@pytest.mark.parametrize("num", [8 * 37, 151_936])
def test_total_over_devices(num):
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("tensor",))
    part = shards.Slice(num // len(devices), ("tensor",), len(devices))
    z = jnp.asarray(tempered(np.random.default_rng(num), 3, num))
    over_devices = jax.shard_map(
        lambda piece: mass.total(piece, part.total),
        mesh=mesh,
        in_specs=PartitionSpec(None, "tensor"),
        out_specs=PartitionSpec(),
    )
    assert len(devices) > 1
    assert num % len(devices) == 0
    assert exact.integers(jax.jit(over_devices)(z)).tolist() == exact.integers(total_in_jit(z)).tolist()


@pytest.mark.parametrize(
    "fraction", [1e-45, 1e-30, 1e-8, 2.0**-25, 2.0**-24, 1e-3, 0.1, 0.3, 0.5, 0.625, 0.9, 0.95, 0.999, 0.99999994]
)
def test_share_is_the_least_mass_that_is_enough(fraction):
    rng = np.random.default_rng(3)
    masses = [*ADVERSARIAL, 2**36, mass.MAX_TERMS * 2**36, *(int(m) for m in rng.integers(0, 2**63, 200))]
    fractions = jnp.full(len(masses), fraction, jnp.float32)
    shares = exact.integers(exact.of_integers(masses).share(fractions)).tolist()
    assert shares == [exact.share(m, fraction) for m in masses]


def test_share_by_hand():
    masses = exact.of_integers([8, 8, 8, 9, 1, 0, 2**24, 2**24])
    fractions = np.array([0.5, 0.375, 0.38, 0.5, 0.5, 0.5, 1e-45, 0.99999994], np.float32)
    assert exact.integers(masses.share(jnp.asarray(fractions))).tolist() == [4, 3, 4, 5, 1, 0, 1, 2**24 - 1]


def test_times():
    rng = np.random.default_rng(4)
    factors = np.array([0, 1, 2, 255, 256, 2**19 - 1, 2**24 - 1, *rng.integers(0, 2**24, 300)])
    masses = [int(m) for m in rng.integers(0, 2**40, len(factors))]
    masses[:7] = [2**40 - 1] * 7
    products = exact.of_integers(masses).times(jnp.asarray(factors.astype(np.int32)))
    assert exact.integers(products).tolist() == [m * int(f) for m, f in zip(masses, factors, strict=True)]


def test_sums_carry():
    a, b = np.meshgrid(np.array(ADVERSARIAL, object), np.array(ADVERSARIAL, object))
    fits = a + b < 2**64
    a, b = a[fits], b[fits]
    assert exact.integers(exact.of_integers(a) + exact.of_integers(b)).tolist() == (a + b).tolist()
    assert ((a % 2**32) + (b % 2**32) >= 2**32).any()


def test_reaches_compares_whole_masses():
    masses = exact.of_integers(ADVERSARIAL)
    reaches = masses[:, None].reaches(masses[None, :])
    a = np.array(ADVERSARIAL, object)
    np.testing.assert_array_equal(reaches, (a[:, None] >= a[None, :]).astype(bool))


def test_masses_as_floats():
    rng = np.random.default_rng(5)
    masses = [*ADVERSARIAL, 2**36, mass.MAX_TERMS * 2**36, *(int(m) for m in rng.integers(0, 2**63, 500))]
    expected = np.array([float(m) for m in masses]) * exact.UNIT
    values = exact.of_integers(masses).to_float()
    assert values.dtype == jnp.float32
    # Either word and their sum round once, 2^-24 each.
    np.testing.assert_allclose(np.asarray(values, np.float64), expected, rtol=2.0**-22, atol=0)
    assert exact.of_integers([2**36, 3 * 2**35, 0]).to_float().tolist() == [1.0, 1.5, 0.0]


def test_index_of_masses():
    masses = exact.of_integers([[5, 2**32 + 6], [2**40, 8]])
    assert exact.integers(masses[:, -1]).tolist() == [2**32 + 6, 8]
    assert exact.integers(masses[1]).tolist() == [2**40, 8]
