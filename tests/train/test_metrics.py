"""Metrics of an iteration against float64 NumPy that loops over the sampled tokens."""

import dataclasses
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmask import Finish, RaggedSupport, Rollout, SamplingBatch, SamplingParams, Support
from train import training
from train.loop import Iteration
from train.metrics import NAMES, Metrics, Pass, iteration_metrics, metrics_row, mismatch_kl
from train.tasks import Rewards

B, T, G, V, W = 6, 5, 3, 40, 4
RNG = np.random.default_rng(8)
SIZES = RNG.choice([1, 1, 2, 3, 4, 5, 8, 9, 17, 40], (B, T)).astype(np.int32)
LENGTHS = np.array([5, 3, 5, 1, 2, 4], np.int32)
SAMPLED = RNG.random((B, T)) < 0.8
FINISH = np.array([Finish.LENGTH, Finish.STOP, Finish.LENGTH, Finish.OVERFLOW, Finish.ERROR, Finish.STOP], np.int32)
MASK = (np.arange(T) < LENGTHS[:, None]) & SAMPLED
VALUES = np.array([0.1, 0.1, 0.1, 0.0, 0.95, 0.95], np.float32)
RATIO = np.exp(RNG.normal(0, 0.7, (B, T))).astype(np.float32)
ENTROPY, KL = RNG.random((2, B, T)).astype(np.float32)

statistics = jax.jit(iteration_metrics)


def rollout(support, mask=MASK, lengths=LENGTHS):
    batch = SamplingBatch.from_params([SamplingParams(top_k=W, seed=0)] * B, vocab_size=V)
    return Rollout(
        prompt_ids=jnp.zeros((B // G, 2), jnp.int32),
        prompt_lengths=jnp.ones(B // G, jnp.int32),
        token_ids=jnp.zeros((B, T), jnp.int32),
        lengths=jnp.asarray(lengths),
        logprobs=jnp.zeros((B, T)),
        support=support,
        finish=jnp.asarray(FINISH),
        sampling=batch,
        group_size=G,
        sampled_mask=jnp.asarray(mask),
    )


def in_cells():
    return Support.from_lists([range(size) for size in SIZES.reshape(-1)], V, W).reshape(B, T)


def in_a_pool():
    counts = jnp.asarray(SIZES)
    return RaggedSupport(jnp.zeros(9, jnp.int32), jnp.zeros_like(counts), counts, jnp.int32(9), V, V)


def measured(given, rewards=VALUES):
    scalars = (jnp.float32(0.3), jnp.float32(0.0))
    one = Pass(*scalars, *(jnp.asarray(values) for values in (RATIO, ENTROPY, KL)))
    scored = Rewards(jnp.asarray(rewards), jnp.asarray(rewards > 0.9))
    return statistics(given, scored, one, jnp.float32(1.5), jnp.float32(0.25), None)


def oracle():
    """The names of `metrics.jsonl`, from lists of the sampled tokens."""
    sizes, ratio, entropy, kl = (values[MASK].astype(np.float64) for values in (SIZES, RATIO, ENTROPY, KL))
    ordered, groups = sorted(sizes), VALUES.astype(np.float64).reshape(-1, G)
    limits = [0, 1, 2, 4, 8, 16, 32, 64]
    return {
        "rewards/mean": VALUES.astype(np.float64).mean(),
        "rewards/std": np.mean([0.0, groups[1].std(ddof=1)]),
        "rewards/zero_std_share": 0.5,
        "rewards/exact": 2 / 6,
        "support/size_mean": sizes.mean(),
        "support/size_median": ordered[int(np.ceil(0.5 * len(sizes))) - 1],
        "support/size_p99": ordered[int(np.ceil(0.99 * len(sizes))) - 1],
        "support/one_id_share": (sizes == 1).mean(),
        "support/overflow_rate": (sizes > W).mean(),
        "support/histogram": [int(((sizes > low) & (sizes <= high)).sum()) for low, high in itertools.pairwise(limits)],
        "completions/mean_length": LENGTHS.mean(),
        "completions/truncated_share": 2 / 6,
        "completions/num_tokens": len(sizes),
        "ratio/max_error": np.abs(ratio - 1).max(),
        "ratio/mean": ratio.mean(),
        "ratio/std": ratio.std(),
        "ratio/mismatch_kl": (ratio - 1 - np.log(ratio)).mean(),
        "entropy": entropy.mean(),
        "clip_fraction": 0.25,
        "grad_norm": 1.5,
        "loss": np.float32(0.3),
        "kl": kl.mean(),
    }


def test_all_metrics_are_those_of_lists_of_tokens():
    row = metrics_row(measured(rollout(in_cells())))
    expected = oracle()
    assert list(row) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(row[name], value, rtol=1e-5, atol=0, err_msg=name)
    assert all(isinstance(value, float) for name, value in row.items() if name != "support/histogram")
    assert all(isinstance(count, int) for count in row["support/histogram"])


def test_supports_in_a_pool_count_alike_but_for_the_overflow():
    cells, pool = (metrics_row(measured(rollout(support))) for support in (in_cells(), in_a_pool()))
    assert pool.pop("support/overflow_rate") == pytest.approx(1 / 6)
    del cells["support/overflow_rate"]
    assert pool == cells


def test_every_field_has_a_name_and_no_name_comes_twice():
    assert set(NAMES) == {field.name for field in dataclasses.fields(Metrics)}
    assert len(set(NAMES.values())) == len(NAMES)


def test_what_lies_outside_the_mask_changes_nothing_even_where_nothing_is_inside(unchecked):
    """P44, P47: finite, and 0 over no tokens."""
    nothing = rollout(in_cells(), mask=np.zeros((B, T), bool), lengths=np.zeros(B, np.int32))
    dirty = np.full((B, T), np.nan, np.float32)
    one = Pass(jnp.float32(0), jnp.float32(0), jnp.asarray(dirty), jnp.asarray(dirty), jnp.asarray(dirty))
    scored = Rewards(jnp.zeros(B), jnp.zeros(B, bool))
    row = metrics_row(statistics(nothing, scored, one, jnp.float32(0), jnp.float32(0), None))
    assert row.pop("rewards/zero_std_share") == 1
    assert row.pop("completions/truncated_share") == pytest.approx(1 / 3)
    assert all(not np.any(value) for value in row.values())


def test_equal_rewards_have_no_deviation_at_all():
    """P41: the mean of equal float32 values need not be that value."""
    metrics = measured(rollout(in_cells()), rewards=np.full(B, 0.1, np.float32))
    assert (float(metrics.reward_std), float(metrics.zero_std_share)) == (0, 1)


def test_the_mismatch_keeps_its_digits_near_one_and_at_the_bounds_of_the_ratio():
    ratio = np.array([[1.0, 1 + 2.0**-12, 1 - 2.0**-12, np.exp(-20.0), np.exp(20.0)]], np.float32)
    mask = np.ones((1, 1), bool)
    for value in ratio[0]:
        exact = float(value) - 1 - np.log(np.float64(value))
        found = mismatch_kl(jnp.full((1, 1), value), jnp.asarray(mask))
        np.testing.assert_allclose(found, exact, rtol=1e-3, atol=0)


def test_the_seconds_of_an_iteration_last_until_its_figures_are_there(monkeypatch):
    """A program of the device returns at once, and runs on."""
    started = time.perf_counter()
    names = {field.name for field in dataclasses.fields(Metrics)} - {"kl", "staleness", "support_histogram"}
    metrics = Metrics(support_histogram=np.array([2]), **dict.fromkeys(names, np.array(2, np.float32)))
    to_host = training.processes.to_host

    def waits(tree):
        time.sleep(0.1)
        return to_host(tree)

    monkeypatch.setattr(training.processes, "to_host", waits)
    row = training._measured(Iteration(metrics), started)
    assert 0.1 <= row["seconds"] <= time.perf_counter() - started
    assert row["tokens_per_second"] == 2 / row["seconds"]
