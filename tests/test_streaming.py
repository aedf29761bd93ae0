import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mock_model import Mock, V, random_model

from jaxmask import SamplingBatch, SamplingParams, generate, stream

PROMPTS = jnp.array([[3, 1, 4], [1, 5, 0], [9, 2, 6], [3, 0, 0]], jnp.int32)
LENGTHS = jnp.array([3, 2, 3, 1], jnp.int32)
PARAMS = [SamplingParams(seed=seed, top_k=4, max_tokens=limit) for seed, limit in enumerate((2, None, 5, 1))]
SHAPES = {"max_new_tokens": 6, "width": 4}


def batch_of(params=PARAMS) -> SamplingBatch:
    return SamplingBatch.from_params(params, vocab_size=V, support_bound=4)


def test_a_stream_is_the_rollout_step_by_step():
    """The same step drives both; rows that have ended add nothing (P81), and it ends with the last of them."""
    rollout = generate(random_model(), batch_of(), PROMPTS, LENGTHS, **SHAPES)
    steps = list(stream(random_model(), batch_of(), PROMPTS, LENGTHS, **SHAPES))
    assert len(steps) == int(rollout.lengths.max()) == 6
    np.testing.assert_array_equal(np.stack([new.token_ids[:, 0] for new in steps], axis=1), rollout.token_ids)
    np.testing.assert_allclose(np.stack([new.logprobs[:, 0] for new in steps], axis=1), rollout.logprobs, atol=1e-6)
    counts = np.stack([new.counts for new in steps], axis=1)
    np.testing.assert_array_equal(counts, rollout.token_mask)
    lists = [[new.support.to_lists()[row][0] for new in steps] for row in range(4)]
    assert lists == rollout.support.to_lists()


def test_a_padded_head_is_never_drawn():
    """P25: columns past the vocabulary win every comparison, and are in no support."""
    table = random_model().table
    padded = Mock(jnp.pad(table, ((0, 0), (0, 8)), constant_values=100.0))
    expected = list(stream(random_model(), batch_of(), PROMPTS, LENGTHS, **SHAPES))
    found = list(stream(padded, batch_of(), PROMPTS, LENGTHS, **SHAPES))
    for one, other in zip(found, expected, strict=True):
        for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(left, right)


def test_settings_never_compile_anew():
    """P72: prompts, settings and seeds are values."""
    compiled = []
    list(stream(random_model(), batch_of(), PROMPTS, LENGTHS, **SHAPES))
    generate(random_model(), batch_of(), PROMPTS, LENGTHS, **SHAPES)
    other = batch_of(
        [SamplingParams(seed=9, top_k=2, top_p=0.5, min_p=0.1, temperature=t) for t in (0.5, 1.0, 1.5, 0.9)]
    )
    model, prompts, lengths = random_model(seed=1), PROMPTS + 1, LENGTHS[::-1]
    jax.block_until_ready((other, model, prompts, lengths))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    steps = list(stream(model, other, prompts, lengths, **SHAPES))
    rollout = generate(model, other, prompts, lengths, **SHAPES)
    assert not compiled
    assert steps[0].token_ids[:, 0].tolist() == rollout.token_ids[:, 0].tolist()


def test_errors_come_at_the_call():
    with pytest.raises(ValueError, match=r"prompt_ids must be in \[0, 40\)"):
        stream(random_model(), batch_of(), PROMPTS + V, LENGTHS, **SHAPES)
    with pytest.raises(ValueError, match="prefill_chunk_size must be at least 1, got 0"):
        stream(random_model(), batch_of(), PROMPTS, LENGTHS, prefill_chunk_size=0, **SHAPES)
    with pytest.raises(ValueError, match="num_logprobs must be"):
        stream(random_model(), batch_of(), PROMPTS, LENGTHS, num_logprobs=-1, **SHAPES)
