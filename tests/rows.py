"""Rows that break samplers, and every combination of filters."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmask import SamplingBatch, SamplingParams

TEMPERATURES = (0.0, 0.01, 0.7, 1.0, 2.0)
MIN_PS = (0.0, 1e-30, 0.05, 0.5, 1.0)
TOP_PS = (1.0, 0.999, 0.9, 0.5, 1e-8)


def filter_grid(vocab_size: int) -> list[SamplingParams]:
    """Every combination of the four filters, with top-k around each limit."""
    top_ks = sorted({-1, 0, 1, 2, 5, 17, 50, max(vocab_size - 1, 1), vocab_size, vocab_size + 10})
    return [
        SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p, seed=index)
        for index, (temperature, min_p, top_k, top_p) in enumerate(
            itertools.product(TEMPERATURES, MIN_PS, top_ks, TOP_PS)
        )
    ]


def take(batch: SamplingBatch, index: np.ndarray) -> SamplingBatch:
    """Some rows of a batch."""
    return jax.tree.map(lambda leaf: leaf[index], batch)


def with_seeds(batch: SamplingBatch, first: int = 0) -> SamplingBatch:
    """The same settings with a different seed in each row."""
    low = np.arange(first, first + batch.num_rows, dtype=np.uint32)
    return dataclasses.replace(batch, seeds=jnp.asarray(np.stack([low, np.zeros_like(low)], axis=1)))


def repeated(params: SamplingParams, count: int, vocab_size: int, first_seed: int = 0, **options) -> SamplingBatch:
    """One request `count` times, with seeds first_seed, first_seed + 1, ..."""
    one = SamplingBatch.from_params(params, vocab_size=vocab_size, **options)
    return with_seeds(take(one, np.zeros(count, np.int32)), first_seed)


def adversarial(rng: np.random.Generator, count: int, vocab_size: int) -> np.ndarray:
    """`count` float32 rows; every kind below comes up about equally often."""
    rows = [KINDS[index % len(KINDS)](rng, vocab_size).astype(np.float32) for index in range(count)]
    return np.stack(rows)


def _sprinkle(x: np.ndarray, rng: np.random.Generator, value: float, share: float) -> np.ndarray:
    return np.where(rng.random(x.size) < share, value, x)


def _subnormal(rng: np.random.Generator, size: int) -> np.ndarray:
    return (rng.integers(-3, 4, size) * np.float32(1e-45)).astype(np.float32)


def _mixed_zeros(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.choice(np.array([0.0, -0.0, 1e-40, -1e-40, 1e-45], np.float32), size)


def _neighbours(rng: np.random.Generator, size: int) -> np.ndarray:
    """Floats one unit in the last place apart."""
    return (np.float32(3.0).view(np.int32) + rng.integers(0, 4, size).astype(np.int32)).view(np.float32)


KINDS = (
    lambda rng, size: rng.normal(size=size),
    lambda rng, size: 10 * rng.normal(size=size),
    lambda rng, size: rng.integers(-2, 3, size).astype(float),
    lambda rng, size: np.full(size, rng.normal()),
    lambda rng, size: _sprinkle(rng.integers(0, 2, size).astype(float), rng, -np.inf, 0.5),
    lambda rng, size: _sprinkle(rng.normal(size=size), rng, np.nan, 0.3),
    lambda rng, size: _sprinkle(rng.normal(size=size), rng, np.inf, 0.3),
    lambda rng, size: rng.choice(np.array([3e38, -3e38, 0.0, 2.9999e38]), size),
    _subnormal,
    _mixed_zeros,
    _neighbours,
    lambda rng, size: _sprinkle(np.full(size, -np.inf), rng, 1.0, 1.5 / size),
    lambda rng, size: np.full(size, rng.choice([-np.inf, np.nan, np.inf])),
    lambda rng, size: np.linspace(5, -5, size),
    lambda rng, size: np.linspace(-5, 5, size),
    lambda rng, size: _sprinkle(np.full(size, -1e5), rng, 1e5, 1.5 / size),
    lambda rng, size: -np.log(rng.permutation(size) + 1.0),
    lambda rng, size: 1e30 + rng.normal(size=size) * 1e24,
)
