"""Audits of rollouts in memory, and what they share with those of files."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmask
from jaxmask.audit import audit, audit_rollout
from tests.rollout_files import VOCAB_SIZE, good_rows

ROWS = good_rows()
FULL = [row.full_logprobs for row in ROWS]


@pytest.fixture(scope="module")
def rollout():
    params = [
        jaxmask.SamplingParams(temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
        for row in ROWS
    ]
    return jaxmask.rollout_from_lists(
        [row.prompt_ids for row in ROWS[::2]],
        [row.token_ids for row in ROWS],
        [row.logprobs for row in ROWS],
        [row.supports for row in ROWS],
        params=params,
        vocab_size=VOCAB_SIZE,
        group_size=2,
        eos_token_ids=(8,),
    )


def padded(lists):
    cells = np.zeros((len(lists), max(map(len, lists))), np.float32)
    for row, values in enumerate(lists):
        cells[row, : len(values)] = values
    return cells


def test_a_good_rollout_passes(rollout):
    result = audit_rollout(rollout, is_strict=True)
    assert (result.is_fit, result.findings, result.vocab_size) == (True, (), VOCAB_SIZE)
    assert result.statistics.sizes.num == sum(len(row.token_ids) for row in ROWS)


def test_memory_and_file_say_the_same(rollout, tmp_path):
    jaxmask.save_rollout(tmp_path / "rollout.npz", rollout, full_logprobs=padded(FULL))
    here, there = audit_rollout(rollout, full_logprobs=padded(FULL)), audit(tmp_path / "rollout.npz")
    assert here.statistics.kept_mass == there.statistics.kept_mass
    assert here.statistics.sizes == there.statistics.sizes
    mass = np.exp(np.concatenate(FULL) - np.concatenate([row.logprobs for row in ROWS]))
    assert here.statistics.kept_mass.mean == pytest.approx(mass.mean(), rel=1e-6)


def test_faults_are_named_by_row_and_position(rollout):
    bad = rollout.token_ids.at[4, 2].set((rollout.token_ids[4, 2] + 1) % VOCAB_SIZE)
    result = audit_rollout(dataclasses.replace(rollout, token_ids=bad))
    places = [(one.code, place.row, place.position) for one in result.findings for place in one.worst]
    assert places == [("sampled-outside", "rollout, row 4", 2)]


def test_stop_ids_and_loss_mask_of_the_rollout_count(rollout):
    stopped = rollout.token_ids.at[0, 3].set(8)
    supports = rollout.support.to_lists()
    supports[0][3] = [8]
    support = jaxmask.Support.from_lists([ids for row in supports for ids in row], VOCAB_SIZE, 24)
    logprobs = rollout.logprobs.at[0, 3].set(0.0)
    changed = dataclasses.replace(
        rollout, token_ids=stopped, support=support.reshape(*rollout.token_ids.shape), logprobs=logprobs
    )
    assert [one.code for one in audit_rollout(changed).errors] == ["trains-behind-stop"]
    before = jnp.arange(rollout.token_ids.shape[1])[None, :] < 4
    masked = dataclasses.replace(changed, sampled_mask=changed.loss_mask & (before | (jnp.arange(6)[:, None] > 0)))
    assert audit_rollout(masked).errors == ()


def test_zeros_for_all_log_probabilities_are_no_rollout(rollout):
    zeros = audit_rollout(dataclasses.replace(rollout, logprobs=jnp.zeros_like(rollout.logprobs)))
    assert [one.code for one in zeros.errors] == ["logprobs-all-zero"]
    assert zeros.num_rows_at_fault == 6
    one_is_not = jnp.zeros_like(rollout.logprobs).at[0, 0].set(-0.5)
    assert len(rollout.support.to_lists()[0][0]) > 1
    assert audit_rollout(dataclasses.replace(rollout, logprobs=one_is_not)).errors == ()


def test_log_probabilities_of_another_mode_are_said(rollout):
    raw = audit_rollout(dataclasses.replace(rollout, logprobs_mode="raw_logprobs"))
    assert {place.detail for one in raw.errors for place in one.worst} == {
        "logprobs_mode: 'raw_logprobs' are not those over the supports"
    }
