import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from jax.extend.random import threefry_2x32 as jax_threefry
from scipy import stats

from jaxmask import draw

ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ALL, ALL), (ALL, ALL), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, expected):
    """Random123's kat_vectors, threefry2x32 with 20 rounds."""
    words = draw.threefry_2x32(*(tuple(jnp.full(1, word, jnp.uint32) for word in pair) for pair in (key, counter)))
    assert tuple(int(word[0]) for word in words) == expected


def test_threefry_is_jax_s_own():
    rng = np.random.default_rng(0)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    counter = rng.integers(0, 2**32, (2, 1000), dtype=np.uint32)
    expected = jax_threefry(jnp.asarray(key), jnp.asarray(counter.reshape(-1)))
    keys = tuple(jnp.full(1000, word, jnp.uint32) for word in key)
    words = draw.threefry_2x32(keys, (jnp.asarray(counter[0]), jnp.asarray(counter[1])))
    np.testing.assert_array_equal(np.concatenate(words), expected)


def noise(num_seeds, num_ids, position=0):
    seeds = np.stack([np.arange(num_seeds), np.arange(num_seeds) % 3], axis=1).astype(np.uint32)
    ids = np.broadcast_to(np.arange(num_ids, dtype=np.int32), (num_seeds, num_ids))
    positions = jnp.full(num_seeds, position, jnp.int32)
    return np.asarray(draw.gumbel(jnp.asarray(seeds), positions, jnp.asarray(ids)), np.float64)


def test_noise_is_standard_gumbel():
    """Mean, variance and the whole distribution function of 400,000 values."""
    g = noise(2000, 200).reshape(-1)
    sigma = np.pi / np.sqrt(6)
    # Mean and variance within 5 standard errors (kurtosis of a Gumbel: 5.4), each with false-alarm rate 6e-7.
    assert abs(g.mean() - np.euler_gamma) < 5 * sigma / np.sqrt(g.size)
    assert abs(g.var() - sigma**2) < 5 * sigma**2 * np.sqrt(4.4 / g.size)
    assert stats.kstest(g, stats.gumbel_r.cdf).pvalue > tolerances.FALSE_ALARM
    assert stats.kstest(g + 0.02, stats.gumbel_r.cdf).pvalue < tolerances.FALSE_ALARM


@pytest.mark.parametrize("axis", ["seed", "position", "id"])
def test_noise_of_neighbours_is_uncorrelated(axis):
    g = noise(2000, 200)
    other = {"seed": noise(2001, 200)[1:], "position": noise(2000, 200, 1), "id": noise(2000, 201)[:, 1:]}[axis]
    # A correlation of n independent pairs has standard deviation 1 / sqrt(n).
    assert abs(np.corrcoef(g.reshape(-1), other.reshape(-1))[0, 1]) < 5 / np.sqrt(g.size)


def test_every_part_of_the_counter_matters_and_nothing_else_does():
    def one(low=1, high=2, position=3, token_id=4):
        seeds = jnp.array([[low, high]], jnp.uint32)
        return float(draw.gumbel(seeds, jnp.array([position], jnp.int32), jnp.array([[token_id]], jnp.int32))[0, 0])

    base = one()
    assert base == one()
    others = [
        one(low=5),
        one(high=5),
        one(position=5),
        one(token_id=5),
        one(low=2, high=1),
        one(position=4, token_id=3),
    ]
    assert len({base, *others}) == 7
    seeds, positions = jnp.array([[9, 9], [1, 2]], jnp.uint32), jnp.array([0, 3], jnp.int32)
    wide = draw.gumbel(seeds, positions, jnp.array([[0, 1, 2], [7, 4, 9]], jnp.int32))
    assert float(wide[1, 1]) == base


def test_noise_is_finite_at_the_extreme_words(monkeypatch):
    words = np.array([[0, 1, 2**31, 2**32 - 2**8, 2**32 - 1]], np.uint32)
    monkeypatch.setattr(draw, "threefry_2x32", lambda key, counter: (jnp.asarray(words), jnp.asarray(words)))
    g = draw.gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 5), jnp.int32))
    u = np.minimum((words.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    np.testing.assert_allclose(np.asarray(g), -np.log(-np.log1p(-u)), rtol=tolerances.LOGPROB)
    assert float(g[0, 0]) == pytest.approx(22.8739, abs=1e-3)
