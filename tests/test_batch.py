import jax
import numpy as np
import pytest

from jaxmask import SamplingBatch, SamplingParams

V = 8


def batch_of(*params: SamplingParams, **options) -> SamplingBatch:
    return SamplingBatch.from_params(list(params), vocab_size=V, **options)


def seeds_of(batch: SamplingBatch) -> list[int]:
    return [int(low) + (int(high) << 32) for low, high in np.asarray(batch.seeds)]


@pytest.mark.parametrize(
    ("settings", "field", "outside"),
    [
        ({"logit_bias": {"8": 5.0}}, "logit_bias", [8]),
        ({"logit_bias": {"191222": -100.0, "3": 1.0}}, "logit_bias", [191222]),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias", [-1]),
        ({"stop_token_ids": [0, 8, -1]}, "stop_token_ids", [8, -1]),
        ({"allowed_token_ids": [7, 8]}, "allowed_token_ids", [8]),
        ({"bad_words": [[1], [2, -3]]}, "bad_words", [-3]),
    ],
)
def test_ids_outside_the_vocabulary(settings, field, outside):
    """P13, P14: they would be clamped, wrapped or dropped on the device."""
    with pytest.raises(ValueError) as error:
        batch_of(SamplingParams(), SamplingParams(**settings))
    assert str(error.value) == (
        f"token_id(s) {outside} in {field} contain out-of-vocab token ids. Vocabulary size: {V}"
    )


def test_eos_ids_are_checked_too():
    with pytest.raises(ValueError, match=r"token_id\(s\) \[8\] in eos_token_ids contain out-of-vocab"):
        batch_of(SamplingParams(), eos_token_ids=[2, 8])


def test_the_last_id_is_inside():
    batch = batch_of(SamplingParams(logit_bias={7: 1.0}, stop_token_ids=[7], allowed_token_ids=[7], bad_words=[[7]]))
    for field in (batch.logit_bias_ids, batch.stop_token_ids, batch.allowed_token_ids, batch.bad_words):
        assert (np.asarray(field) == 7).any()


def test_bad_words_as_text_need_a_tokenizer():
    with pytest.raises(ValueError, match=r"bad_words given as text need a tokenizer; .* got 'no'"):
        batch_of(SamplingParams(bad_words=[[1], "no"]))


def test_no_requests():
    with pytest.raises(ValueError, match="params must hold at least one SamplingParams"):
        batch_of()


def test_one_request_needs_no_list():
    one = SamplingBatch.from_params(SamplingParams(n=2, seed=5, top_k=3), vocab_size=V)
    assert seeds_of(one) == [5, 6]
    assert one.num_rows == 2


def test_n_rows_per_request_with_consecutive_seeds():
    batch = batch_of(SamplingParams(n=3, seed=10, top_k=2), SamplingParams(seed=7, top_k=4))
    assert seeds_of(batch) == [10, 11, 12, 7]
    assert batch.top_k.tolist() == [2, 2, 2, 4]


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        pytest.param(2**32 - 1, [2**32 - 1, 2**32, 2**32 + 1], id="carry into the high word"),
        pytest.param(2**64 - 2, [2**64 - 2, 2**64 - 1, 0], id="wrap at 2^64"),
        pytest.param(-2, [2**64 - 2, 2**64 - 1, 0], id="negative seeds are two's complement"),
    ],
)
def test_seeds_are_64_bit(seed, expected):
    assert seeds_of(batch_of(SamplingParams(n=3, seed=seed))) == expected
    assert seeds_of(batch_of(SamplingParams(seed=seed)).repeat(3)) == expected


def test_rows_without_a_seed_draw_one_each():
    seeds = seeds_of(batch_of(SamplingParams(), SamplingParams(seed=-1), SamplingParams()))
    assert len(set(seeds)) == 3
    drawn = seeds_of(batch_of(SamplingParams(n=2)))
    assert drawn[1] == (drawn[0] + 1) % 2**64


def test_filters_that_are_off_have_neutral_values():
    batch = batch_of(
        SamplingParams(top_k=0),
        SamplingParams(top_k=-1),
        SamplingParams(top_k=5),
        SamplingParams(top_k=8),
        SamplingParams(top_k=10**12),
        SamplingParams(temperature=0.0, top_k=2, top_p=0.5, min_p=0.5),
    )
    assert batch.top_k.tolist() == [V, V, 5, V, V, V]
    assert batch.top_p.tolist() == [1.0] * 6
    assert batch.min_p.tolist() == [0.0] * 6
    assert batch.temperature.tolist() == [1.0] * 5 + [0.0]


OPTIONAL = {
    "min_tokens": {"min_tokens": 1},
    "withheld_token_ids": {"min_tokens": 1},
    "allowed_token_ids": {"allowed_token_ids": [1]},
    "logit_bias_ids": {"logit_bias": {1: 1.0}},
    "logit_bias_values": {"logit_bias": {1: 1.0}},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "bad_words": {"bad_words": [[1]]},
    "returns_support": {"return_sampling_mask": False},
}


def test_edits_nobody_uses_are_none():
    plain = batch_of(SamplingParams(), SamplingParams(top_k=3, temperature=0.5, return_sampling_mask=True))
    assert all(getattr(plain, field) is None for field in OPTIONAL)
    assert not plain.needs_history


@pytest.mark.parametrize(("field", "settings"), OPTIONAL.items())
def test_one_user_makes_an_edit_an_array(field, settings):
    batch = batch_of(SamplingParams(), SamplingParams(**settings))
    same_request = {other for other, need in OPTIONAL.items() if need == settings}
    assert {other for other in OPTIONAL if getattr(batch, other) is not None} == same_request
    neutral = {"repetition_penalty": 1.0, "returns_support": True, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    neutral |= {"min_tokens": 0, "logit_bias_values": 0.0}
    assert (np.asarray(getattr(batch, field))[0] == neutral.get(field, V)).all()
    looks_back = {"repetition_penalty", "frequency_penalty", "presence_penalty", "bad_words"}
    assert batch.needs_history == (field in looks_back)
    assert batch.has_penalties == (field in looks_back - {"bad_words"})


def test_stop_ids_and_withheld_ids():
    """P21: ignoring EOS leaves the user's own stop ids; P20: min_tokens withholds EOS and stop ids alike."""
    batch = batch_of(
        SamplingParams(stop_token_ids=[4], min_tokens=2),
        SamplingParams(stop_token_ids=[5], ignore_eos=True),
        SamplingParams(ignore_eos=True),
        eos_token_ids=(2, 3),
    )
    stops = [sorted(i for i in row if i < V) for row in np.asarray(batch.stop_token_ids).tolist()]
    assert stops == [[2, 3, 4], [5], []]
    withheld = [sorted(i for i in row if i < V) for row in np.asarray(batch.withheld_token_ids).tolist()]
    assert withheld == [[2, 3, 4], [], []]
    assert batch.min_tokens.tolist() == [2, 0, 0]


def test_no_limit_is_larger_than_any_limit():
    assert batch_of(SamplingParams(max_tokens=None), SamplingParams(max_tokens=7)).max_tokens.tolist() == [2**31 - 1, 7]


def test_lists_are_padded_to_powers_of_two_with_an_id_no_token_has():
    def widths(count):
        ids = list(range(count))
        batch = batch_of(
            SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=dict.fromkeys(ids, 1.0)),
            SamplingParams(),
        )
        assert np.asarray(batch.stop_token_ids)[0].tolist() == ids + [V] * (batch.stop_token_ids.shape[1] - count)
        return {x.shape[1] for x in (batch.stop_token_ids, batch.allowed_token_ids, batch.logit_bias_ids)}

    assert [widths(count) for count in range(1, 9)] == [{1}, {2}, {4}, {4}, {8}, {8}, {8}, {8}]


def test_bad_words_are_right_aligned():
    batch = batch_of(SamplingParams(bad_words=[[1], [2, 3, 4], [5, 6]]), SamplingParams())
    assert batch.bad_words.tolist() == [
        [[V, V, V, 1], [V, 2, 3, 4], [V, V, 5, 6], [V, V, V, V]],
        [[V, V, V, V]] * 4,
    ]


def test_the_promised_bound_is_checked():
    fits = SamplingParams(top_k=4)
    assert batch_of(fits, SamplingParams(return_sampling_mask=False), support_bound=4).support_bound == 4
    for wide in (SamplingParams(top_k=5), SamplingParams(top_k=0), SamplingParams(temperature=0.0, top_k=1)):
        with pytest.raises(ValueError, match=r"top_k must be in \[1, 4\] and temperature > 0 .* got top_k="):
            batch_of(fits, wide, support_bound=4)


def test_repeat_copies_every_setting_and_steps_the_seed():
    batch = batch_of(
        SamplingParams(seed=100, top_k=3, logit_bias={1: 2.0}, bad_words=[[1, 2]]),
        SamplingParams(seed=2**32 - 2, temperature=0.5, return_sampling_mask=False),
    )
    repeated = batch.repeat(3)
    assert seeds_of(repeated) == [100, 101, 102, 2**32 - 2, 2**32 - 1, 2**32]
    assert repeated.num_rows == 6
    for before, after in zip(jax.tree.leaves(batch)[1:], jax.tree.leaves(repeated)[1:], strict=True):
        np.testing.assert_array_equal(np.repeat(np.asarray(before), 3, axis=0), after)
    assert jax.tree.structure(batch) == jax.tree.structure(repeated)
