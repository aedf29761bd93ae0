import pytest
from pydantic import ValidationError

from serve.api.errors import ApiError
from serve.api.fields import NEUTRAL, StreamOptions
from serve.api.openai_fields import OpenAIFields


def test_what_was_left_out_comes_from_the_model():
    defaults = {"temperature": 0.5, "top_k": 7, "max_tokens": 5}
    params = OpenAIFields(temperature=0.9, top_k=None).params(defaults, max_tokens=None, logprobs=None)
    assert (params.temperature, params.top_k, params.max_tokens, params.top_p) == (0.9, 7, 5, 1)
    assert OpenAIFields(top_k=0).params(defaults, max_tokens=9).max_tokens == 9
    assert OpenAIFields(top_k=0).params(defaults).top_k == 0
    assert OpenAIFields().params({}).max_tokens == 16
    assert OpenAIFields(prompt_logprobs=2).params({}).prompt_logprobs == 2
    assert OpenAIFields(prompt_logprobs=2).params({}, prompt_logprobs=3).prompt_logprobs == 3


def test_a_range_is_checked_with_the_model_s_own_settings():
    with pytest.raises(ApiError, match="min_tokens must be less than or equal to max_tokens=5, got 6") as caught:
        OpenAIFields(min_tokens=6).params({"max_tokens": 5})
    assert (caught.value.status, caught.value.param) == (400, "min_tokens")


def test_names():
    assert OpenAIFields(request_id="mine").name("cmpl") == "cmpl-mine"
    assert OpenAIFields().name("cmpl") != OpenAIFields().name("cmpl")


@pytest.mark.parametrize("field", NEUTRAL)
def test_fields_that_ask_for_nothing(field):
    for value in NEUTRAL[field]:
        assert OpenAIFields(**{field: value}) == OpenAIFields()
    with pytest.raises(ValidationError, match=f"{field} is not supported by this server, got 'anything'"):
        OpenAIFields(**{field: "anything"})
    # 1 and True are equal, and not the same.
    with pytest.raises(ValidationError, match="use_beam_search is not supported"):
        OpenAIFields(use_beam_search=0)


def test_whole_characters():
    assert OpenAIFields(request_id="日本\U0001f389").request_id == "日本\U0001f389"
    for half in ("\ud800", "a\udfffb"):
        with pytest.raises(ValidationError, match="whole characters alone"):
            OpenAIFields(request_id=half)
    assert ApiError(404, "no \ud800").message == "no \\ud800"


def test_nested_bodies_are_as_strict():
    assert StreamOptions(include_usage=True, continuous_usage_stats=None).include_usage
    with pytest.raises(ValidationError, match="include_usages"):
        StreamOptions(include_usages=True)
