"""Rollouts come back from their files as they were."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_files import VOCAB_SIZE, good_rows, groups_of, rollout_arrays

from jaxmask import RaggedSupport, SamplingParams, load_rollout, rollout_from_lists, save_rollout
from jaxmask.audit import files

ROWS = good_rows(2, 2, 7)


def rollout(**changes):
    """Of the good rows, with everything that a rollout may hold."""
    params = SamplingParams(temperature=0.8, top_k=24, top_p=0.9, min_p=0.002, logit_bias={3: 0.0}, seed=1)
    made = rollout_from_lists(
        [group[0].prompt_ids for group in groups_of(ROWS)],
        [row.token_ids for row in ROWS],
        [row.logprobs for row in ROWS],
        [row.supports for row in ROWS],
        params=params,
        vocab_size=VOCAB_SIZE,
        group_size=2,
        policy_versions=[[5] * len(row.token_ids) for row in ROWS],
        eos_token_ids=[2],
        width=changes.pop("width", None),
    )
    return dataclasses.replace(made, **changes)


def pooled(support):
    """The same supports in a pool, the last row's first."""
    lists = [ids for row in reversed(support.to_lists()) for ids in row]
    counts = np.array([len(ids) for ids in lists], np.int32)
    offsets = (np.cumsum(counts) - counts).reshape(support.shape)[::-1]
    pool = np.full(counts.sum() + 9, VOCAB_SIZE, np.int32)
    pool[: counts.sum()] = [token_id for ids in lists for token_id in ids]
    return RaggedSupport(
        jnp.asarray(pool),
        jnp.asarray(offsets.astype(np.int32)),
        support.counts,
        jnp.int32(counts.sum()),
        support.width,
        VOCAB_SIZE,
    )


def check_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("width", [None, 3, 64])
def test_all_leaves_come_back(tmp_path, width):
    """Also of supports that are wider than their cells, and of cells that are wider than their supports."""
    saved = rollout(width=width, num_steps=jnp.arange(4, dtype=jnp.int32))
    assert (saved.support.packed is not None) is (width == 3)
    save_rollout(tmp_path / "a.npz", saved)
    check_equal(load_rollout(tmp_path / "a.npz"), saved)


def test_bits_that_nothing_needs_come_back(tmp_path):
    saved = rollout()
    support = dataclasses.replace(saved.support, packed=rollout(width=3).support.packed)
    save_rollout(tmp_path / "a.npz", dataclasses.replace(saved, support=support))
    check_equal(load_rollout(tmp_path / "a.npz").support, support)


def test_a_pool_comes_back_in_the_order_of_the_tokens(tmp_path):
    saved = rollout()
    save_rollout(tmp_path / "a.npz", dataclasses.replace(saved, support=pooled(saved.support)))
    loaded = load_rollout(tmp_path / "a.npz")
    assert loaded.support.to_lists() == saved.support.to_lists()
    assert loaded.support.token_ids.shape == pooled(saved.support).token_ids.shape
    assert (loaded.support.width, loaded.support.vocab_size) == (saved.support.width, VOCAB_SIZE)
    check_equal(loaded.support.to_support(), saved.support)


def test_what_is_optional_may_be_missing(tmp_path):
    saved = rollout(sampled_mask=None, policy_versions=None)
    save_rollout(str(tmp_path / "a"), saved)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    check_equal(load_rollout(tmp_path / "a"), saved)


def test_the_audit_reads_it_as_it_reads_the_arrays(tmp_path):
    """Those that the tests of the audit write by hand are those of a real rollout."""
    more = {"sampling_stop_token_ids": rollout().sampling.stop_token_ids, "prompt_lengths": rollout().prompt_lengths}
    named = rollout_arrays(ROWS) | {name: np.array(array) for name, array in more.items()}
    deeper = {name: named[name] for name in ("full_logprobs", "kept_logprobs", "logits")}
    save_rollout(tmp_path / "a.npz", rollout(), **deeper)
    np.savez(tmp_path / "b.npz", **named)
    (one,), (other,) = files.read(tmp_path / "a.npz"), files.read(tmp_path / "b.npz")
    assert one.malformed == other.malformed == ()
    for field in dataclasses.fields(one):
        if field.name not in ("names", "num_bytes"):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"jaxmask_rollout": 2}, "no rollout of version 1"),
        ({"jaxmask_rollout": None}, "no rollout of version 1"),
        ({"lengths": None}, "no array 'lengths'"),
        ({"sampling_vocab_size": None}, "no array 'sampling_vocab_size'"),
        ({"support_counts": np.ones((4, 7), np.int32)}, "cut"),
        ({"support_counts": np.ones(28, np.int32)}, "cut"),
        ({"sampling_vocab_size": 7}, "outside"),
    ],
)
def test_a_file_that_does_not_fit_together(tmp_path, change, text):
    save_rollout(tmp_path / "a.npz", rollout())
    with np.load(tmp_path / "a.npz") as archive:
        arrays = {name: archive[name] for name in archive.files} | change
    np.savez(tmp_path / "a.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ValueError, match=text):
        load_rollout(tmp_path / "a.npz")


def test_an_object_in_a_file_is_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", jaxmask_rollout=np.array([{}], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        load_rollout(tmp_path / "a.npz")


def test_a_file_that_is_no_archive(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04" + bytes(90))
    for name in ("a.npy", "b.npz"):
        with pytest.raises(ValueError, match="no NumPy archive"):
            load_rollout(tmp_path / name)
