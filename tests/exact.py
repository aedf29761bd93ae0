"""Masses as Python and NumPy integers, and top-p by them: what `jaxmask.mass` promises, one obvious step at a time."""

import jax.numpy as jnp
import numpy as np

from jaxmask.mass import Mass

UNIT = 2.0**-36


def units(z: np.ndarray) -> np.ndarray:
    """floor(exp(z) 2^36) of each entry, int64; exp is XLA's float32, for which odd lanes are padded away."""
    num = z.shape[1]
    whole = np.pad(np.asarray(z, np.float32), ((0, 0), (0, -num % 64)), constant_values=-np.inf)
    weights = np.asarray(jnp.exp(jnp.asarray(whole)), np.float64)[:, :num]
    return np.floor(weights / UNIT).astype(np.int64)


def integers(mass: Mass) -> np.ndarray:
    """The masses as Python integers."""
    return np.asarray(mass.high).astype(object) * 2**32 + np.asarray(mass.low).astype(object)


def of_integers(values) -> Mass:
    """Python integers as masses."""
    values = np.asarray(values, object)
    return Mass(*(jnp.asarray(words.astype(np.uint32)) for words in (values // 2**32, values % 2**32)))


def share(total: int, fraction: float) -> int:
    """The least mass that is at least a fraction, of 24 bits, of the total."""
    factor = int(np.clip(np.round(np.float64(np.float32(fraction)) * 2**24), 1, 2**24 - 1))
    return -(-factor * int(total) // 2**24)


def nucleus_length(z_in_order: np.ndarray, length: int, top_p: float) -> int:
    """Tokens that top-p keeps of the first `length` of a row in canonical order."""
    if length == 0 or top_p == 1:
        return length
    running = np.cumsum(units(z_in_order[None, :])[0, :length])
    return int(np.searchsorted(running, share(running[-1], top_p), side="left")) + 1
