"""Supports against those of Hugging Face transformers' own filters, in our order, on rows without ties.

Recorded by tests/data/make_transformers_filters.py. test_reference.py has transformers' order, and log-probabilities.
"""

import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tie_free import tie_free

from jaxmask import SamplingBatch, SamplingParams, sample

RECORDED = np.load(Path(__file__).parent / "data" / "transformers_filters.npz")
NUM_GROUPS = len(RECORDED["groups"])


def group(seed: int) -> tuple[np.ndarray, list[SamplingParams], np.ndarray]:
    """Logits, requests and what transformers kept."""
    vocab_size, scale = int(RECORDED["groups"][seed, 0]), float(RECORDED["groups"][seed, 1])
    settings = RECORDED[f"settings_{seed}"]
    logits = tie_free(seed, len(settings), vocab_size, scale)
    requests = [
        SamplingParams(
            temperature=float(temperature), min_p=float(min_p), top_k=int(top_k), top_p=float(top_p), seed=row
        )
        for row, (temperature, min_p, top_k, top_p) in enumerate(settings)
    ]
    return logits, requests, np.unpackbits(RECORDED[f"kept_{seed}"], axis=1, count=vocab_size).astype(bool)


# The narrow width leaves to the search over whole rows what the wide one settles in its columns.
@pytest.mark.parametrize("width", [4, 256])
@pytest.mark.parametrize("seed", range(NUM_GROUPS))
def test_supports_are_those_of_transformers(seed, width):
    logits, requests, keep = group(seed)
    batch = SamplingBatch.from_params(requests, vocab_size=logits.shape[1])
    drawn = sample(jnp.asarray(logits), batch, step=0, width=width)
    rows = np.flatnonzero(oracle.truth(logits, requests).is_exact)
    np.testing.assert_array_equal(np.asarray(drawn.support.to_mask())[rows], keep[rows])
    np.testing.assert_array_equal(np.asarray(drawn.support.counts)[rows], keep[rows].sum(axis=1))
    assert np.take_along_axis(keep, np.asarray(drawn.token_ids)[:, None], axis=1)[rows].all()


def test_nearly_every_row_is_compared():
    is_exact = np.concatenate(
        [oracle.truth(logits, requests).is_exact for logits, requests, _ in map(group, range(NUM_GROUPS))]
    )
    assert len(is_exact) >= 600
    assert is_exact.mean() > 0.97


@pytest.mark.parametrize("seed", range(NUM_GROUPS))
def test_the_logits_are_those_of_the_record(seed):
    logits, _, _ = group(seed)
    assert zlib.crc32(logits.astype("<f4").tobytes()) == RECORDED[f"checksum_{seed}"]
    assert all(len(np.unique(row)) == len(row) for row in logits)


def test_the_record_holds_every_set_of_filters():
    neutral = np.array([1.0, 0.0, 0.0, 1.0])
    assert RECORDED["fields"].tolist() == ["temperature", "min_p", "top_k", "top_p"]
    for seed in range(NUM_GROUPS):
        assert len(np.unique(RECORDED[f"settings_{seed}"] != neutral, axis=0)) == 16
