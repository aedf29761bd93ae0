"""A learner on rollouts from elsewhere: the same numbers as on jaxmask's own, and tokens of others are context."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, OPTIMIZER, TASK, make_model

from jaxmask import SamplingBatch, SamplingParams, generate, masked_log_probs, rollout_from_csr, rollout_from_lists
from jaxmask.wire import to_csr
from train.gradients import Learner, accumulate, logprobs
from train.rows import learner_rows
from train.step import grpo_step
from train.tasks import Rewards

pytestmark = pytest.mark.unoptimized
# Those that ask for equal bits.
OPTIMIZED = pytest.mark.optimized

T, W, EOS = 6, 4, 2
V = TASK.vocab_size
ADVANTAGES = jnp.asarray(np.linspace(-1, 1, 16), jnp.float32)
gradient = jax.jit(accumulate, static_argnums=2)
make_rows = jax.jit(learner_rows)
PARAMS = [
    SamplingParams(temperature=0.7 + row / 20, top_k=4, top_p=0.9, seed=row, logit_bias={EOS: row / 8}, max_tokens=T)
    for row in range(16)
]


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def own(model):
    """Completions of different lengths, each row with settings of its own."""
    prompts = TASK.prompts(jax.random.key(5), 4)
    batch = SamplingBatch.from_params(PARAMS, vocab_size=V, eos_token_ids=[EOS], support_bound=W)
    ids, lengths = jnp.asarray(prompts.token_ids), jnp.asarray(prompts.lengths)
    return generate(model, batch, ids, lengths, max_new_tokens=T, width=W, group_size=4)


def as_lists(rollout):
    """What an engine would have sent of it."""
    lengths = rollout.lengths.tolist()
    cut = [(row, length) for row, length in enumerate(lengths)]
    return {
        "prompts": [rollout.prompt_ids[p, :n].tolist() for p, n in enumerate(rollout.prompt_lengths.tolist())],
        "completions": [rollout.token_ids[row, :length].tolist() for row, length in cut],
        "logprobs": [rollout.logprobs[row, :length].tolist() for row, length in cut],
        "supports": [ids[:length] for ids, length in zip(rollout.support.to_lists(), lengths, strict=True)],
    }


def receive(lists, **options):
    shapes = {"vocab_size": V, "eos_token_ids": [EOS], "group_size": 4, "width": W, "max_length": T}
    return rollout_from_lists(**lists, params=PARAMS, **shapes | options)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)


@OPTIMIZED
def test_there_and_back_nothing_changes(model, own):
    assert len(set(own.lengths.tolist())) > 2
    back = receive(as_lists(own))
    np.testing.assert_array_equal(back.loss_mask, own.loss_mask)
    bound = dataclasses.replace(back.sampling, support_bound=W)
    assert_equal(dataclasses.replace(back, sampled_mask=None, sampling=bound, num_steps=own.num_steps), own)

    inside = np.asarray(own.loss_mask).reshape(-1)
    token_ids, offsets = to_csr(own.support)
    lists = as_lists(own)
    del lists["supports"]
    sparse = rollout_from_csr(
        **lists, token_ids=token_ids, counts=np.diff(offsets)[inside], params=PARAMS, vocab_size=V, group_size=4,
        eos_token_ids=[EOS], width=W, max_length=T,
    )  # fmt: skip
    assert_equal(sparse, back)

    assert_equal(gradient(model, make_rows(back, ADVANTAGES), Learner(CONFIG)),
                 gradient(model, make_rows(own, ADVANTAGES), Learner(CONFIG)))  # fmt: skip


@OPTIMIZED
def test_supports_stored_ragged_train_alike(model, own):
    """Cells are made of one micro-batch at a time."""
    ids, lengths = own.prompt_ids, own.prompt_lengths
    drawn = generate(model, own.sampling, ids, lengths, max_new_tokens=T, width=W, group_size=4, max_ids=16 * T * W)
    parts = Learner(dataclasses.replace(CONFIG, num_micro_batches=2))
    ragged, cells = (gradient(model, make_rows(one, ADVANTAGES), parts) for one in (drawn, own))
    assert_equal(ragged, cells)


def test_the_ratio_is_one_with_settings_of_each_row(state, own):
    rewards = Rewards(jnp.linspace(0.0, 1.0, 16), jnp.zeros(16, bool))
    step = jax.jit(grpo_step, static_argnames=("config", "optimizer"))
    after, metrics = step(state, receive(as_lists(own)), rewards, config=CONFIG, optimizer=OPTIMIZER)
    assert metrics.max_ratio_error <= 1e-5
    assert metrics.support_size > 1
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (state.model, after.model)), strict=True))


def with_tool(own, answer):
    """The first two tokens of each row, two of a tool, and a second turn; what was given of the tool means nothing."""
    lists = as_lists(own)
    for row, ids in enumerate(lists["completions"]):
        turn = slice(0, min(2, len(ids)))
        middle = [[5, answer], [None, float("nan")], [None, None]]
        for field, others in zip(("completions", "logprobs", "supports"), middle, strict=True):
            lists[field][row] = lists[field][row][turn] + others + lists[field][row][turn]
    mask = [
        [True] * (len(ids) // 2 - 1) + [False, False] + [True] * (len(ids) // 2 - 1) for ids in lists["completions"]
    ]
    return lists, mask


@OPTIMIZED
def test_tokens_of_others_are_context(model, own):
    """Their log-probs and supports reach no gradient; the tokens themselves are read by the model."""
    lists, mask = with_tool(own, 7)
    clean = receive(lists, loss_mask=mask)
    found, _ = gradient(model, make_rows(clean, ADVANTAGES), Learner(CONFIG))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))

    held = clean.loss_mask
    assert not held.all(axis=1).any()
    dirty = dataclasses.replace(
        clean,
        logprobs=jnp.where(held, clean.logprobs, jnp.nan),
        support=dataclasses.replace(
            clean.support,
            token_ids=jnp.where(held[:, :, None], clean.support.token_ids, 3),
            counts=jnp.where(held, clean.support.counts, 99),
        ),
    )
    assert_equal(gradient(model, make_rows(dirty, ADVANTAGES), Learner(CONFIG))[0], found)
    for field, garbage in (("logprobs", 7.0), ("supports", [9, 9])):
        for entries, flags in zip(lists[field], mask, strict=True):
            entries[:] = [entry if flag else garbage for entry, flag in zip(entries, flags, strict=True)]
    assert_equal(receive(lists, loss_mask=mask), clean)

    other, _ = gradient(model, make_rows(receive(with_tool(own, 8)[0], loss_mask=mask), ADVANTAGES), Learner(CONFIG))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True))


def test_each_token_is_scored_behind_all_that_stands_before_it(model, own):
    """Against logits of whole rows put together by hand."""
    lists, mask = with_tool(own, 7)
    rollout = receive(lists, loss_mask=mask)
    rows = make_rows(rollout, ADVANTAGES)
    whole = np.zeros(rows.token_ids.shape, np.int32)
    start = len(lists["prompts"][0])
    for row, completion in enumerate(lists["completions"]):
        ids = lists["prompts"][row // 4] + completion[:-1]
        whole[row, : len(ids)] = ids
        assert rows.token_ids[row, : len(ids)].tolist() == ids
        assert int(rows.lengths[row]) == len(ids)
    logits = jax.jit(lambda model, ids: model.logits(ids))(model, whole)[:, start - 1 : start - 1 + T]
    logits = logits.at[:, :, EOS].add(jnp.asarray([p.logit_bias[EOS] for p in PARAMS], jnp.float32)[:, None])
    tempered = logits / rollout.sampling.temperature[:, None, None]
    expected = masked_log_probs(tempered, rollout.support, rollout.token_ids)
    found = jax.jit(logprobs, static_argnums=2)(model, rows, Learner(CONFIG))
    held = np.asarray(rollout.loss_mask)
    np.testing.assert_allclose(np.asarray(found)[held], np.asarray(expected)[held], rtol=0, atol=1e-5)
