"""What the offline API refuses before anything runs: field, value and what would do are named."""

import numpy as np
import pytest

from jaxmask import SamplingParams
from serve import LLM
from serve.config import EngineConfig
from serve.inputs import conversations, listed_prompts, settings_of, speculation_of

PARAMS = SamplingParams()
MESSAGE = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def _unchecked(unchecked):
    """Wrong types must reach our own checks."""


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {3}, iter(["a"])])
def test_prompts_of_other_types(prompts):
    with pytest.raises(ValueError, match="prompts must be text, token ids or a list of such, got"):
        listed_prompts(prompts)


def test_one_prompt_or_many():
    assert listed_prompts("a") == ["a"]
    assert listed_prompts([1, 2]) == [[1, 2]]
    assert listed_prompts(["a", [1]]) == ["a", [1]]
    assert listed_prompts([]) == []
    (alone,) = listed_prompts(np.array([3, 4]))
    assert alone.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("x", "sampling_params must be SamplingParams or a list of them, got 'x'"),
        ({"top_k": 5}, "sampling_params must be SamplingParams or a list of them"),
        (5, "sampling_params must be SamplingParams or a list of them, got 5"),
        ([PARAMS, None], "sampling_params must hold SamplingParams, got None at index 1"),
        ([PARAMS], "The lengths of prompts and params must be the same, got 2 and 1"),
    ],
)
def test_settings_of_other_types(params, message):
    with pytest.raises(ValueError, match=message):
        settings_of(params, 2)


@pytest.mark.parametrize("messages", ["hi", None, MESSAGE, [], [5], [[]], [[MESSAGE], []], [{"content": "hi"}]])
def test_messages_of_other_types(messages):
    with pytest.raises(ValueError, match=r"messages? must be a"):
        conversations(messages)


def test_one_conversation_or_many():
    assert conversations([MESSAGE]) == [[MESSAGE]]
    assert conversations([[MESSAGE], (MESSAGE, MESSAGE)]) == [[MESSAGE], (MESSAGE, MESSAGE)]


@pytest.mark.parametrize("settings", ["ngram", {"method": "medusa"}, {"method": "draft_model"}])
def test_guesses_of_other_kinds(settings):
    with pytest.raises(ValueError, match="speculative_config must have the method 'ngram', or 'draft_model'"):
        speculation_of(settings, "auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unbounded_support": "no"}, "unbounded_support must be True or False, got 'no'"),
        ({"return_sampling_mask": "yes"}, "return_sampling_mask must be True or False, got 'yes'"),
        ({"min_num_seqs": 9, "max_num_seqs": 4}, "min_num_seqs must be at most max_num_seqs=4, got 9"),
    ],
)
def test_engine_settings(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_flags_of_a_request():
    with pytest.raises(ValueError, match="ignore_eos must be True or False, got 'x'"):
        SamplingParams(ignore_eos="x")
    with pytest.raises(ValueError, match="return_sampling_mask must be True or False, got 'yes'"):
        SamplingParams(return_sampling_mask="yes")


def test_a_model_that_is_none():
    with pytest.raises(ValueError, match="model must be a name, a path or a model with prefill and decode, got 5"):
        LLM(5)
