"""Edits replayed on the ids of supports are the sampler's, to the last bit; and the ratio is 1 with all of them on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

from jaxmask import (
    History,
    Reference,
    Replay,
    Rollout,
    SamplingBatch,
    SamplingParams,
    Support,
    full_scores,
    sample,
    support_log_probs,
    support_scores,
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


REQUESTS = {
    "every edit": EVERY_EDIT,
    "repetition": [SamplingParams(top_k=12, repetition_penalty=2.0, seed=seed) for seed in range(5)],
}
append = jax.jit(lambda history, token_ids: history.append(token_ids, jnp.ones(token_ids.shape, jnp.bool_)))
edits_of = jax.jit(EditTerms.for_vocabulary)
apply_jitted = jax.jit(lambda logits, terms, batch: apply_edits(drawable(logits), terms, batch))


@functools.cache
def rollout_of(name, seed, width=W):
    """Completions drawn step by step from the states of a seed, and the edited logits [B, T, V] they were drawn from.

    Supports that do not fit `width` cells have packed bits, too.
    """
    params = REQUESTS[name]
    hidden, head = states(seed)
    prompts = jnp.array([[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 7, 7], [8, 9, 0]], jnp.int32)
    lengths = jnp.array([3, 2, 1, 3, 2], jnp.int32)
    options = {"vocab_size": V, "eos_token_ids": [0], "support_bound": W}
    # With the arrays of every edit, whatever is used, so that all rollouts are drawn by one program.
    batch = SamplingBatch.from_params(params, **options, like=SamplingBatch.from_params(EVERY_EDIT, **options))
    history = History.start(prompts, lengths, batch)
    drawn, edited = [], []
    for step in range(T):
        logits = hidden[:, step] @ head.T
        terms = edits_of(batch, history, jnp.full(len(params), step, jnp.int32))
        edited.append(apply_jitted(logits, terms, batch))
        drawn.append(sample(logits, batch, step=step, history=history, width=width))
        history = append(history, drawn[-1].token_ids)
    columns = [[getattr(one, name) for one in drawn] for name in ("token_ids", "logprobs")]
    token_ids, logprobs = (jnp.stack(column, axis=1) for column in columns)
    supports = [one.support.reshape(len(params), 1) for one in drawn]
    support = Support.concatenate(supports, axis=1)
    full = jnp.full(len(params), T, jnp.int32)
    rollout = Rollout(prompts, lengths, token_ids, full, logprobs, support, jnp.ones(len(params), jnp.int32), batch)
    return rollout, jnp.stack(edited, axis=1)


@functools.cache
def states(seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((5, T, D), (V, D))]


def test_kept_columns_are_edited_as_whole_rows_are():
    hidden, head = states()
    rollout, edited = rollout_of("every edit", 0)
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
    rollout, _ = rollout_of("every edit", 1)
    replay = Replay.of(rollout)
    temperature = jnp.broadcast_to(rollout.sampling.temperature[:, None], (5, T))

    @functools.partial(jax.jit, static_argnums=1)
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
    rollout, _ = rollout_of("repetition", 2)
    replay = Replay.of(rollout)

    def total(hidden):
        return support_log_probs(hidden, head, rollout.support, rollout.token_ids, replay=replay).sum()

    found = jax.jit(jax.grad(total))(hidden)
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
    rollout, _ = rollout_of("every edit", 0)
    plain = SamplingBatch.from_params([SamplingParams(top_k=4, seed=seed) for seed in range(5)], vocab_size=V)
    assert Replay.of(rollout) is not None
    assert Replay.of(dataclasses.replace(rollout, sampling=plain)) is None


@functools.cache
def wide_rollout():
    """Supports of 1 to 12 ids in cells for 9: more than half of them are packed bits alone."""
    hidden, head = states(1)
    rollout, _ = rollout_of("every edit", 1, width=9)
    assert rollout.support.packed is not None
    assert 0.2 < (np.asarray(rollout.support.counts) > 9).mean() < 0.8
    return hidden, head, rollout


def scores_of(rollout, hidden, head, replay, **options):
    temperature = jnp.broadcast_to(rollout.sampling.temperature[:, None], (5, T))
    return support_scores(
        hidden, head, rollout.support, rollout.token_ids, temperature=temperature, replay=replay, **options
    )


def test_edits_are_replayed_on_supports_wider_than_their_cells():
    hidden, head, rollout = wide_rollout()
    replay = Replay.of(rollout)
    narrow, _ = rollout_of("every edit", 1)
    np.testing.assert_array_equal(narrow.token_ids, rollout.token_ids)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradient(hidden, head, rollout, replay):
        scores = scores_of(rollout, hidden, head, replay)
        return scores.logprobs.sum() + scores.entropy.sum(), scores

    wide_gradients, found = gradient(hidden, head, rollout, replay)
    np.testing.assert_allclose(found.logprobs, rollout.logprobs, rtol=0, atol=tolerances.LOGPROB)
    narrow_gradients, _ = gradient(hidden, head, narrow, Replay.of(narrow))
    pairs = zip(wide_gradients, narrow_gradients, strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerances.GRADIENT * np.abs(other).max())


def test_edits_are_replayed_over_the_vocabulary():
    """Without supports too: the entropy is that of the edited logits, ids that were taken away included as nothing."""
    hidden, head = states(1)
    rollout, edited = rollout_of("every edit", 1)
    temperature = jnp.broadcast_to(rollout.sampling.temperature[:, None], (5, T))
    found = jax.jit(full_scores)(hidden, head, rollout.token_ids, temperature=temperature, replay=Replay.of(rollout))
    logits = np.asarray(edited, np.float64) / np.asarray(temperature)[:, :, None]
    keep = np.isfinite(logits)
    p = np.exp(np.where(keep, logits, -np.inf))
    lp = logits - np.log(p.sum(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(found.entropy, -(p * np.where(keep, lp, 0)).sum(axis=2), atol=tolerances.LOGPROB)
    drawn = np.take_along_axis(lp, np.asarray(rollout.token_ids)[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(found.logprobs, drawn, rtol=tolerances.LOGPROB, atol=tolerances.LOGPROB)
    assert (~keep).any(), "some ids were taken away"


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4)])
def test_the_first_step_is_the_identity_on_several_devices(sizes):
    """Every edit, cells and packed bits, rows and vocabulary cut; neither 5 rows nor 40 ids divide by all sizes."""
    hidden, head, rollout = wide_rollout()
    mesh = jax.make_mesh(sizes, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "tensor"))
    found = jax.jit(functools.partial(scores_of, sharding=cut))(rollout, hidden, head, Replay.of(rollout))
    np.testing.assert_allclose(found.logprobs, rollout.logprobs, rtol=0, atol=tolerances.LOGPROB)


def test_a_replay_of_other_tokens_is_refused():
    hidden, head, rollout = wide_rollout()
    with pytest.raises(ValueError, match=r"replay is of tokens \(5, 9\), and hidden has \(5, 8\)"):
        support_log_probs(
            hidden[:, :8], head, rollout.support[:, :8], rollout.token_ids[:, :8], replay=Replay.of(rollout)
        )


def test_a_history_of_many_tokens_at_once_is_that_of_one_by_one():
    batch = SamplingBatch.from_params(EVERY_EDIT, vocab_size=V, eos_token_ids=[0])
    rng = np.random.default_rng(0)
    # A negative id is none, and must not count as one of the last.
    prompts, outputs = (jnp.asarray(rng.integers(-1, V, (5, n)), jnp.int32) for n in (3, T))
    lengths = jnp.array([0, 1, 4, 9, 2], jnp.int32)
    start = History.start(prompts, jnp.full(5, 3, jnp.int32), batch)
    slow, jitted = start, jax.jit(History.append)
    for step in range(T):
        slow = jitted(slow, outputs[:, step], step < lengths)
    for one, other in zip(jax.tree.leaves(start.extend(outputs, lengths)), jax.tree.leaves(slow), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_lies_in_rows_that_are_not_scored_changes_nothing():
    """States, references, temperatures, supports and settings of tokens outside the loss mask, NaN in all of them."""
    hidden, head, rollout = wide_rollout()
    mask = jnp.ones((5, T), jnp.bool_).at[1].set(False).at[2, 3:].set(False).at[3].set(False)
    nan = jnp.nan

    def total(hidden, head, arrays):
        ref_hidden, temperature, support, token_ids, replay = arrays
        options = {
            "temperature": temperature,
            "replay": replay,
            "loss_mask": mask,
            "reference": Reference(ref_hidden, head),
        }
        kept = support_scores(hidden, head, support, token_ids, **options)
        full = full_scores(hidden, head, token_ids, **options)
        parts = (score for scores in (kept, full) for score in (scores.logprobs, scores.entropy, scores.kl))
        return sum(jnp.where(mask, part, 0.0).sum() for part in parts)

    temperature = jnp.broadcast_to(rollout.sampling.temperature[:, None], (5, T))
    clean = hidden + 0.1, temperature, rollout.support, rollout.token_ids, Replay.of(rollout)
    of_rows = mask.any(axis=1)
    batch = rollout.sampling
    dirty_batch = dataclasses.replace(
        batch,
        repetition_penalty=jnp.where(of_rows, batch.repetition_penalty, nan),
        frequency_penalty=jnp.where(of_rows, batch.frequency_penalty, jnp.inf),
        logit_bias_values=jnp.where(of_rows[:, None], batch.logit_bias_values, nan),
    )
    support = dataclasses.replace(
        rollout.support,
        token_ids=jnp.where(mask[:, :, None], rollout.support.token_ids, 3),
        counts=jnp.where(mask, rollout.support.counts, 999),
        packed=jnp.where(mask[:, :, None], rollout.support.packed, jnp.uint8(255)),
    )
    spoilt = dataclasses.replace(rollout, sampling=dirty_batch, support=support)
    dirty = (
        jnp.where(mask[:, :, None], hidden + 0.1, nan),
        jnp.where(mask, temperature, nan),
        support,
        rollout.token_ids,
        Replay.of(spoilt),
    )
    gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    expected = gradient(hidden, head, clean)
    found = gradient(jnp.where(mask[:, :, None], hidden, nan), head, dirty)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
