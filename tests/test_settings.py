import numpy as np
import pytest

from jaxmask import SamplingParams, settings

V = 8


def test_requests_are_a_list():
    one, two = SamplingParams(top_k=1), SamplingParams(top_k=2)
    assert settings.as_requests(one) == [one]
    assert settings.as_requests((one, two)) == [one, two]


def test_fields_that_are_neither_used_nor_asked_for_are_none():
    rows = [SamplingParams(), SamplingParams()]
    assert set(settings.edits(rows, V, {}).values()) == {None}
    assert settings.returns_support(rows, {}) is None
    made = settings.ends(rows, V, (3,), {})
    assert made["min_tokens"] is None
    assert made["withheld_token_ids"] is None
    assert made["stop_token_ids"].tolist() == [[3], [3]]


def test_least_sizes_are_lower_bounds():
    rows = [SamplingParams(bad_words=[[1, 2], [3]]), SamplingParams(allowed_token_ids=[4, 5, 6])]
    made = settings.edits(rows, V, {"bad_words": (3, 1), "allowed_token_ids": (2,), "logit_bias_ids": (1,)})
    assert made["bad_words"].tolist() == [[[1, 2], [V, 3], [V, V]], [[V, V]] * 3]
    assert made["allowed_token_ids"].tolist() == [[V] * 4, [4, 5, 6, V]]
    assert made["logit_bias_ids"].tolist() == [[V], [V]]
    assert made["logit_bias_values"].tolist() == [[0.0], [0.0]]
    assert made["repetition_penalty"] is None


@pytest.mark.parametrize(
    ("field", "neutral"),
    [("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0)],
)
def test_one_field_asked_for_is_one_field_made(field, neutral):
    made = settings.edits([SamplingParams()] * 2, V, {field: ()})
    assert [name for name, value in made.items() if value is not None] == [field]
    assert made[field].tolist() == [neutral] * 2
    assert made[field].dtype == np.float32


def test_a_bound_binds_those_who_return_their_support():
    settings.check_bound(SamplingParams(top_k=4), 4)
    settings.check_bound(SamplingParams(return_sampling_mask=False), 4)
    with pytest.raises(ValueError, match=r"support_bound=4, got top_k=5, temperature=1\.0\.$"):
        settings.check_bound(SamplingParams(top_k=5), 4)
