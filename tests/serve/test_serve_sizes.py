import pydantic
import pytest

from jaxmask import SamplingParams
from serve.api.generate import TokenSampling
from serve.sizes import check_sizes, without_repeats


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": [f"{number}." for number in range(257)]}, "stop must hold at most 256 strings, got 257."),
        ({"stop": ["a" * 40_000, "b" * 40_000]}, "stop must have at most 65536 characters in all, got 80000."),
        ({"bad_words": [[5]] * 1025}, "bad_words must hold at most 1024 words, got 1025."),
        ({"bad_words": [[5] * 65]}, "bad_words must have at most 64 token ids each, got one of length 65."),
        ({"bad_words": ["a" * 40_000]}, "bad_words must have at most 64 token ids each, got one of length 40000."),
    ],
)
def test_more_than_is_taken_is_refused_by_its_size(settings, message):
    with pytest.raises(ValueError, match=message):
        check_sizes(SamplingParams(**settings))


def test_the_most_that_is_taken():
    check_sizes(SamplingParams(stop=["ab"] * 256, bad_words=[[5] * 64] * 1023 + ["a" * 64]))


def test_a_text_of_too_many_ids_is_refused():
    with pytest.raises(ValueError, match="at most 64 token ids each, got one of length 65"):
        without_repeats(SamplingParams(bad_words=[[1], [5] * 65]))


def test_what_is_said_twice_is_kept_once():
    params = SamplingParams(stop_token_ids=[5] * 1000 + [3], allowed_token_ids=[4, 3, 4], bad_words=[[5], [6], [5]])
    found = without_repeats(params)
    assert found.stop_token_ids == (5, 3)
    assert found.allowed_token_ids == (4, 3)
    assert found.bad_words == ((5,), (6,))
    assert without_repeats(found) is found
    assert without_repeats(SamplingParams()) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": [[1]] * 1025}, "bad_words must hold at most 1024 values, got 1025"),
        # Their kinds are not looked at.
        ({"stop": [None] * 257}, "stop must hold at most 256 values, got 257"),
        ({f"key{number}": 1 for number in range(257)}, "an object must have at most 256 fields, got 257"),
    ],
)
def test_bodies_that_would_take_long_are_refused_with_one_error(fields, message):
    with pytest.raises(pydantic.ValidationError, match=message) as refusal:
        TokenSampling.model_validate(fields)
    assert refusal.value.error_count() == 1
