"""Agreement with Hugging Face transformers: supports and log-probabilities its processors gave for the same logits.

Its order is temperature, top-k, top-p, then min-p, and it keeps every tie: settings with min-p and rows where a tie
sits on a boundary differ from our contract on purpose and are left out.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances

from jaxmask import SamplingBatch, SamplingParams, masked_log_probs, sample

REFERENCE = np.load(Path(__file__).parent / "data" / "sampling_reference.npz")
LOGITS, SETTINGS = REFERENCE["logits"], REFERENCE["settings"]
SCORE = jax.jit(masked_log_probs)
NUM_ROWS, V = LOGITS.shape
HAS_TIES = np.array([len(np.unique(row)) < V for row in LOGITS])


@pytest.mark.parametrize("width", [8, 113])
def test_transformers_processors(width):
    compared = 0
    for index, (temperature, top_k, top_p, min_p) in enumerate(SETTINGS):
        if min_p > 0:
            continue
        request = SamplingParams(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p), seed=index)
        batch = SamplingBatch.from_params([request] * NUM_ROWS, vocab_size=V)
        batch = dataclasses.replace(batch, support_bound=V)  # one program for all settings
        drawn = sample(jnp.asarray(LOGITS), batch, step=0, width=width)
        # The file's bits are in NumPy's default order, the highest first; log-probabilities outside are written as 0.
        keep = np.unpackbits(REFERENCE["support"][index], axis=1, count=V).astype(bool)
        truth = oracle.truth(LOGITS, [request] * NUM_ROWS)
        rows = np.flatnonzero(~HAS_TIES & truth.is_exact)
        np.testing.assert_array_equal(np.asarray(drawn.support.to_mask())[rows], keep[rows])
        tokens = np.asarray(drawn.token_ids)
        reference = np.take_along_axis(REFERENCE["logprobs"][index], tokens[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(np.asarray(drawn.logprobs)[rows], reference[rows], atol=tolerances.LOGPROB)
        scored = SCORE(jnp.asarray(LOGITS), drawn.support, drawn.token_ids, temperature=batch.temperature)
        np.testing.assert_allclose(np.asarray(scored)[rows], reference[rows], atol=tolerances.LOGPROB)
        compared += len(rows)
    assert compared > 0.5 * NUM_ROWS * (SETTINGS[:, 3] == 0).sum()
