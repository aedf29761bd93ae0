"""Edits replayed on the ids of supports are the sampler's, to the last bit; and the ratio is 1 with all of them on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tolerances

from jaxmask import (
    History,
    Replay,
    Rollout,
    SamplingBatch,
    SamplingParams,
    Support,
    sample,
    support_log_probs,
)
from jaxmask.edits import EditTerms, apply_edits
from jaxmask.filters import drawable

V, W, T, D = 40, 12, 9, 6
EVERY_EDIT = (
    SamplingParams(top_k=12, seed=0, repetition_penalty=1.7, logit_bias={3: 2.5, 4: -1.0}),
    SamplingParams(top_k=9, seed=1, frequency_penalty=0.8, presence_penalty=-0.6, temperature=0.7),
    SamplingParams(top_k=12, seed=2, bad_words=[[5], [1, 2], [7, 8, 9]], min_tokens=4, stop_token_ids=[11]),
    SamplingParams(top_k=6, seed=3, allowed_token_ids=list(range(0, 40, 3)), top_p=0.9),
    SamplingParams(top_k=12, seed=4),
)


def rollout_of(params, hidden, head):
    """Completions drawn step by step from fixed states, and the edited logits [B, T, V] they were drawn from."""
    prompts = jnp.array([[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 7, 7], [8, 9, 0]], jnp.int32)
    lengths = jnp.array([3, 2, 1, 3, 2], jnp.int32)
    batch = SamplingBatch.from_params(params, vocab_size=V, eos_token_ids=[0], support_bound=W)
    history = History.start(prompts, lengths, batch) if batch.needs_history else None
    drawn, edited = [], []
    for step in range(T):
        logits = hidden[:, step] @ head.T
        terms = EditTerms.for_vocabulary(batch, history, jnp.full(len(params), step, jnp.int32))
        edited.append(apply_edits(drawable(logits), terms, batch))
        drawn.append(sample(logits, batch, step=step, history=history, width=W))
        if history is not None:
            history = history.append(drawn[-1].token_ids, jnp.ones(len(params), jnp.bool_))
    columns = [[getattr(one, name) for one in drawn] for name in ("token_ids", "logprobs")]
    token_ids, logprobs = (jnp.stack(column, axis=1) for column in columns)
    support = Support(
        jnp.stack([one.support.token_ids for one in drawn], axis=1),
        jnp.stack([one.support.counts for one in drawn], axis=1),
        None,
        V,
    )
    full = jnp.full(len(params), T, jnp.int32)
    rollout = Rollout(prompts, lengths, token_ids, full, logprobs, support, jnp.ones(len(params), jnp.int32), batch)
    return rollout, jnp.stack(edited, axis=1)


def states(seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((5, T, D), (V, D))]


def test_kept_columns_are_edited_as_whole_rows_are():
    hidden, head = states()
    rollout, edited = rollout_of(EVERY_EDIT, hidden, head)
    replay = Replay.of(rollout)
    columns = jnp.minimum(rollout.support.token_ids, V - 1)
    raw = jnp.take_along_axis(jnp.stack([hidden[:, t] @ head.T for t in range(T)], axis=1), columns, axis=2)
    expected = jnp.take_along_axis(edited, columns, axis=2)
    cells = np.asarray(rollout.support.cells())
    np.testing.assert_array_equal(np.asarray(replay.edited(raw))[cells], np.asarray(expected)[cells])
    assert (np.asarray(raw)[cells] != np.asarray(expected)[cells]).mean() > 0.05, "edits do something here"


def test_the_first_step_is_the_identity_with_every_edit_on():
    """P52: policy and behaviour agree before any update, with penalties, bias, bad words and min-tokens."""
    hidden, head = states(1)
    rollout, _ = rollout_of(EVERY_EDIT, hidden, head)
    replay = Replay.of(rollout)
    temperature = jnp.broadcast_to(rollout.sampling.temperature[:, None], (5, T))

    def logprobs(replay, implementation="xla"):
        options = {"temperature": temperature, "replay": replay, "implementation": implementation}
        return support_log_probs(hidden, head, rollout.support, rollout.token_ids, **options)

    for implementation in ("xla", "interpret"):
        found = logprobs(replay, implementation)
        np.testing.assert_allclose(found, rollout.logprobs, rtol=0, atol=tolerances.LOGPROB)
    assert np.abs(logprobs(None) - rollout.logprobs).max() > 0.1, "without the edits they would not agree"


def test_gradients_pass_through_the_edits():
    """Of a repetition penalty r: d log p / d x is that of the edited logit, over r or times r by its sign."""
    hidden, head = states(2)
    params = [dataclasses.replace(EVERY_EDIT[4], repetition_penalty=2.0, seed=seed) for seed in range(5)]
    rollout, _ = rollout_of(params, hidden, head)
    replay = Replay.of(rollout)

    def total(hidden):
        return support_log_probs(hidden, head, rollout.support, rollout.token_ids, replay=replay).sum()

    found = jax.grad(total)(hidden)
    logits = np.einsum("btd,vd->btv", hidden, head).astype(np.float64)
    expected = np.zeros(hidden.shape)
    for row in range(5):
        seen = set(np.asarray(rollout.prompt_ids)[row, : rollout.prompt_lengths[row]].tolist())
        for step in range(T):
            ids = np.asarray(rollout.support.token_ids)[row, step, : rollout.support.counts[row, step]]
            x = logits[row, step, ids]
            slope = np.where(np.isin(ids, list(seen)), np.where(x > 0, 0.5, 2.0), 1.0)
            p = np.exp(x * slope) / np.exp(x * slope).sum()
            drawn = int(rollout.token_ids[row, step])
            expected[row, step] = (((ids == drawn) - p) * slope) @ np.asarray(head, np.float64)[ids]
            seen.add(drawn)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerances.GRADIENT * np.abs(expected).max())


def test_a_rollout_without_edits_has_nothing_to_replay():
    hidden, head = states()
    rollout, _ = rollout_of([SamplingParams(top_k=4, seed=seed) for seed in range(5)], hidden, head)
    assert Replay.of(rollout) is None
