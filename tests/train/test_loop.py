"""Iterations whose rewards come from the host: the order of things, refills, what is drawn ahead."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_task import HostDigits, make_built, make_config
from tiny import CONFIG, rollout_of

from train import checkpoint
from train.refill import num_flat, refilled
from train.tasks import Rewards, Scored
from train.tasks.base import Cursor

FILLED = dataclasses.replace(CONFIG, dynamic_sampling=True, max_refills=2)


def iterated(config, num, task=None):
    """The runs before and after `num` iterations, their records, and the task that was asked."""
    task = HostDigits() if task is None else task
    built = make_built(config, task)
    runs, records = [built.run], []
    for step in range(num):
        run, record = built.loop.iterate(runs[-1], step)
        runs.append(run)
        records.append(record)
    return runs, records, task


def test_prompts_come_in_the_order_of_the_cursor():
    runs, records, task = iterated(make_config(6), 6)
    asked = [entry for entries in task.asked for entry in entries]
    assert [epoch for epoch, _ in asked] == [0] * 20 + [1] * 4
    assert sorted(index for epoch, index in asked if epoch == 0) == list(range(20)), "each prompt once an epoch"
    assert runs[-1].progress.cursor == Cursor(1, 4)
    assert set(records[0].seconds) == {"rollout", "reward", "update"}
    assert records[0].details["rewards/answer"] == pytest.approx(float(records[0].metrics.reward), abs=1e-6)


def test_a_rollout_drawn_ahead_is_one_update_old():
    runs, records, task = iterated(make_config(3, overlap=True), 3)
    assert [float(record.metrics.staleness) for record in records] == [0, 1, 1]
    assert float(records[0].metrics.max_ratio_error) <= 1e-5
    assert float(records[1].metrics.max_ratio_error) > 1e-5, "drawn by the policy before the update"
    # Drawn, drawn ahead, named again, drawn ahead, ...
    assert task.asked[1] == task.asked[2]
    assert task.asked[3] == task.asked[4]
    assert runs[-1].progress.ahead_cursor == Cursor(0, 12)
    assert runs[-1].progress.cursor == Cursor(0, 16)


def test_the_next_rollout_is_asked_for_before_the_rewards_are_there():
    seen = []

    class Slow(HostDigits):
        def score(self, entries, completions, group_size):
            while len(self.asked) < 2:
                pass
            seen.append(len(self.asked))
            return super().score(entries, completions, group_size)

    iterated(make_config(1, overlap=True), 1, Slow())
    assert seen == [2]


def test_nobody_waits_for_rewards_of_a_run_that_ends():
    class Hanging(HostDigits):
        is_over = threading.Event()

        def draw(self, cursor, num):
            if self.asked:
                raise KeyboardInterrupt
            return super().draw(cursor, num)

        def score(self, entries, completions, group_size):
            assert self.is_over.wait(60)
            raise RuntimeError("closed")

        def close(self):
            super().close()
            self.is_over.set()

    task = Hanging()
    with pytest.raises(KeyboardInterrupt):
        iterated(make_config(1, overlap=True), 1, task)
    assert not task.is_open


def test_a_run_that_overlaps_goes_on_from_its_checkpoint_bit_for_bit(tmp_path):
    config = make_config(4, overlap=True)
    runs, _, _ = iterated(config, 2)
    checkpoint.save(tmp_path, 2, runs[-1])
    whole, records, _ = iterated(config, 4)
    built = make_built(config, HostDigits())
    step, run = checkpoint.restore_latest(tmp_path, dataclasses.replace(built.run, ahead=runs[-1].ahead), print)
    assert (step, run.progress) == (2, runs[-1].progress)
    for step in (2, 3):
        run, record = built.loop.iterate(run, step)
    assert float(record.metrics.loss) == float(records[-1].metrics.loss)
    same_leaves(run, whole[-1])


def same_leaves(one, other):
    ours, theirs = (checkpoint.named_leaves(run) for run in (one, other))
    assert list(ours) == list(theirs)
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)


def rewards_of(values):
    return Rewards(jnp.asarray(values, jnp.float32).reshape(-1), jnp.zeros(16, bool))


@pytest.fixture
def rollouts(state):
    """Two rollouts of four groups; the token ids of the second are all 9."""
    rollout = rollout_of(state)
    return rollout, dataclasses.replace(rollout, token_ids=jnp.full_like(rollout.token_ids, 9))


def test_groups_that_teach_nothing_give_their_places_to_others_in_order(rollouts):
    own = rewards_of([[0, 1, 0, 1], [1, 1, 1, 1], [0.1] * 4, [0, 0, 0, 1]])
    more = rewards_of([[0, 0, 0, 0], [0, 0, 0, 0.5], [2, 2, 2, 2], [3, 3, 3, 3]])
    merged, rewards, left = refilled(rollouts[0], own, rollouts[1], more)
    assert int(num_flat(rollouts[0], own)) == 2
    assert int(left) == 1
    assert rewards.values.reshape(4, 4).tolist() == [[0, 1, 0, 1], [0, 0, 0, 0.5], [np.float32(0.1)] * 4, [0, 0, 0, 1]]
    is_new = (merged.token_ids == 9).reshape(4, 4, -1).all(axis=(1, 2))
    assert is_new.tolist() == [False, True, False, False]
    for field in ("prompt_ids", "lengths", "logprobs"):
        assert getattr(merged, field).shape == getattr(rollouts[0], field).shape


def test_more_useful_groups_than_places_change_no_others(rollouts):
    own = rewards_of([[0, 1, 0, 1]] * 3 + [[1, 1, 1, 1]])
    merged, rewards, left = refilled(rollouts[0], own, rollouts[1], rewards_of([[0, 0.25, 0, 0]] * 4))
    assert int(left) == 0
    assert (merged.token_ids == 9).reshape(4, -1).all(axis=1).tolist() == [False, False, False, True]
    np.testing.assert_array_equal(rewards.values[:12], own.values[:12])


def test_dynamic_sampling_draws_further_prompts_until_the_batch_is_full():
    class Picky(HostDigits):
        """Only the third batch has groups of different rewards."""

        def score(self, entries, completions, group_size):
            scored = super().score(entries, completions, group_size)
            values = np.full(16, 0.1, np.float32) if self.num_scored < 3 else np.tile([0, 1], 8).astype(np.float32)
            details = {"rewards/answer": float(self.num_scored), "rewards/num_failed": 2.0}
            return Scored(Rewards(values, scored.rewards.is_exact), details)

    runs, records, task = iterated(make_config(1, FILLED), 1, Picky())
    assert len(task.asked) == 3
    assert len({entry for entries in task.asked for entry in entries}) == 12, "other prompts each time"
    assert runs[-1].progress.cursor == Cursor(0, 12)
    found = {name: value for name, value in records[0].details.items() if name.startswith("dynamic")}
    assert found == {
        "dynamic_sampling/useful_share": 0.0,
        "dynamic_sampling/num_refills": 2.0,
        "dynamic_sampling/filled_share": 1.0,
    }
    assert records[0].details["rewards/num_failed"] == 6.0, "those of all three batches"
    assert records[0].details["rewards/answer"] == 1.0, "of the first one"
    assert float(records[0].metrics.reward) == 0.5
    assert float(records[0].metrics.grad_norm) > 0


def test_a_batch_that_stays_empty_changes_nothing():
    """FAULTS P41, P44: equal rewards alone: loss 0, gradient 0, finite metrics."""

    class Flat(HostDigits):
        def score(self, entries, completions, group_size):
            return dataclasses.replace(
                super().score(entries, completions, group_size),
                rewards=Rewards(np.full(16, 0.1, np.float32), np.zeros(16, bool)),
            )

    runs, records, task = iterated(make_config(1, FILLED), 1, Flat())
    assert len(task.asked) == 1 + FILLED.max_refills
    metrics = records[0].metrics
    assert float(metrics.loss) == float(metrics.grad_norm) == float(metrics.num_tokens) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(metrics))
    for one, other in zip(
        jax.tree.leaves(make_built(make_config(1), HostDigits()).run.train.model),
        jax.tree.leaves(runs[-1].train.model),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_truncated_completions_leave_both_sides_of_the_fraction(rollouts):
    """FAULTS P43: every completion of this task ends by its length, so with the mask on nothing trains."""
    from train.rows import trainable

    config = dataclasses.replace(CONFIG, mask_truncated=True)
    rollout = rollouts[0]
    stopped = dataclasses.replace(rollout, finish=rollout.finish.at[0].set(1))
    rewards, step = rewards_of(np.arange(16)), jnp.int32(0)
    assert int(trainable(rollout, rewards, step, config).loss_mask.sum()) == 0
    assert int(trainable(stopped, rewards, step, config).loss_mask.sum()) == int(rollout.lengths[0])
