"""Logits without ties that any machine makes again from a seed, bit for bit."""

import numpy as np


def tie_free(seed: int, num_rows: int, vocab_size: int, scale: float) -> np.ndarray:
    """[num_rows, vocab_size] float32, close to normal with deviation `scale`, all entries of a row different.

    Whole steps of scale / 65536, so that a last bit of somebody's logarithm changes nothing. With a scale of few bits
    they are exact in float32 and stay different when they are divided by a temperature.
    """
    steps = np.rint(2**16 * np.random.default_rng(seed).standard_normal((num_rows, vocab_size))).astype(np.int64)
    order = np.argsort(steps, axis=1, kind="stable")
    ascending = np.take_along_axis(steps, order, axis=1)
    # In: [3, 3, 3, 9]  Out: [3, 4, 5, 9]
    rank = np.arange(vocab_size)
    ascending = np.maximum.accumulate(ascending - rank, axis=1) + rank
    np.put_along_axis(steps, order, ascending, axis=1)
    return (steps * (scale / 2**16)).astype(np.float32)
