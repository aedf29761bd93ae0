"""Held-out evaluation: what is right, on which prompts, and the chance of k draws."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_task import HostDigits
from tiny import CONFIG, TASK, make_model

from train import evaluation
from train.evaluation import HELD_OUT, complete, evaluate, pass_at_k
from train.loop import make_prompts
from train.progress import Progress
from train.run_config import EvaluationConfig

KEY = jax.random.key(0)


def test_pass_at_k_counts_the_draws_that_hold_a_right_one():
    for num, k in itertools.product([4, 7], [1, 2, 4]):
        for num_correct in range(num + 1):
            draws = list(itertools.combinations([True] * num_correct + [False] * (num - num_correct), k))
            assert pass_at_k(num, num_correct, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_one_is_the_share_of_right_samples():
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
    assert pass_at_k(64, 1, 64) == 1.0
    assert math.isfinite(pass_at_k(1000, 3, 512))


class Marked(HostDigits):
    """The first completion of a prompt is right; of greedy ones, those of odd prompts."""

    def score(self, entries, completions, group_size):
        self.asked.append((entries, completions, group_size))
        scored = super().score(entries, completions, group_size)
        rows = np.arange(len(completions))
        is_right = rows % 2 == 1 if group_size == 1 else rows % group_size == 0
        return dataclasses.replace(scored, rewards=dataclasses.replace(scored.rewards, is_exact=is_right))


def test_every_held_out_prompt_is_answered_once_whatever_the_blocks():
    """18 prompts: greedily in blocks of 16 rows, by four samples in blocks of four prompts."""
    task = Marked()
    found = evaluate(make_model(), task, CONFIG, EvaluationConfig(1, 18, 4), KEY)
    assert found == {
        "eval/greedy": 8 / 18 + 1 / 18,
        "eval/pass@1": 0.25,
        "eval/pass@2": 0.5,
        "eval/pass@4": 1.0,
    }
    for group_size in (1, 4):
        entries = [entry for asked, _, size in task.asked if size == group_size for entry in asked]
        assert entries == [(1000, index) for index in range(18)]
    assert all(len(rows) == len(asked) * size for asked, rows, size in task.asked)
    greedy = [row for _, rows, size in task.asked if size == 1 for row in rows]
    again = Marked()
    assert evaluate(make_model(), again, CONFIG, EvaluationConfig(1, 18, 4), KEY) == found
    assert again.asked == task.asked, "the same seeds at every evaluation"
    sampled = [rows[::4] for _, rows, size in task.asked if size == 4]
    assert [row for rows in sampled for row in rows] != greedy


def test_greedy_completions_are_those_of_teacher_forcing():
    model, prompts = make_model(), make_prompts(TASK, KEY, 3)
    options = {"config": CONFIG, "vocab_size": TASK.vocab_size, "eos_token_ids": ()}
    rollout = complete(model, prompts, KEY, group_size=1, is_greedy=True, **options)
    ids = jnp.concatenate([prompts.token_ids, rollout.token_ids], axis=1)
    best = jax.jit(lambda model, ids: model.logits(ids))(model, ids)[:, 3:-1, : TASK.vocab_size].argmax(axis=-1)
    np.testing.assert_array_equal(rollout.token_ids, best)
    assert not rollout.support.counts.any(), "no supports are kept"


def test_a_task_of_the_device_is_asked_what_no_iteration_asks(monkeypatch):
    seen = []
    monkeypatch.setattr(
        evaluation, "make_prompts", lambda task, key, num: seen.append(key) or make_prompts(task, key, num)
    )
    found = evaluate(make_model(), TASK, CONFIG, EvaluationConfig(1, 5), KEY)
    assert set(found) == {"eval/greedy"}
    (key,) = seen
    assert (
        jax.random.key_data(key) == jax.random.key_data(jax.random.fold_in(jax.random.fold_in(KEY, HELD_OUT), HELD_OUT))
    ).all()
    prompts = make_prompts(TASK, key, 5)
    options = {"config": CONFIG, "vocab_size": TASK.vocab_size, "eos_token_ids": ()}
    rollout = complete(make_model(), prompts, KEY, group_size=1, is_greedy=True, **options)
    assert found["eval/greedy"] == pytest.approx(float(TASK.score(rollout).is_exact.mean(dtype=jnp.float32)), abs=1e-6)


def test_evaluations_are_counted_since_the_best():
    progress = Progress()
    counts = []
    for score in (0.0, 0.5, 0.5, 0.4, 0.625):
        progress = progress.after_evaluation(score)
        counts.append((progress.best, progress.num_without_gain))
    assert counts == [(0.0, 0), (0.5, 0), (0.5, 1), (0.5, 2), (0.625, 0)]
    assert progress.stops(EvaluationConfig(1)) is None
    assert "early_stop_target 0.6" in progress.stops(EvaluationConfig(1, early_stop_target=0.6))
    assert progress.after_evaluation(0.1).stops(EvaluationConfig(1, early_stop_patience=1)) is not None
