import dataclasses
import itertools

import pytest
from engine_models import MODEL, WORDS

from jaxmask import DraftModel, SamplingParams
from serve.config import EngineConfig, bucket, default_params, derived_seeds, most_tokens
from serve.engine import Engine


def test_buckets():
    assert [bucket(size) for size in (0, 1, 2, 3, 4, 5, 33)] == [1, 1, 2, 4, 4, 8, 64]
    assert [bucket(size, 24) for size in (3, 16, 17, 24)] == [4, 16, 24, 24]


def test_defaults_are_those_settings_that_vllm_takes():
    content = {"temperature": 0.6, "top_k": None, "top_p": 0.9, "eos_token_id": 2, "max_new_tokens": 7}
    assert default_params(content) == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=7)
    assert default_params({}) == SamplingParams()


def test_seeds():
    first, again, other = (list(itertools.islice(derived_seeds(seed), 5)) for seed in (0, 0, 1))
    assert first == again
    assert len({*first, *other}) == 10
    assert all(0 <= seed < 2**64 for seed in first)
    assert max(first) > 2**60


def test_a_draft_model_limits_the_length_too():
    short = dataclasses.replace(MODEL, max_length=32)
    config = EngineConfig(speculation=DraftModel(short, num_tokens=3))
    assert most_tokens(MODEL, EngineConfig()) == 64
    assert most_tokens(MODEL, config) == 28
    with pytest.raises(ValueError, match=r"max_model_len must be in \[2, 28\]"):
        most_tokens(MODEL, dataclasses.replace(config, max_model_len=29))


def test_prompts_are_scored_by_models_that_read_whole_rows():
    engine = Engine(MODEL, WORDS)
    engine.limits = dataclasses.replace(engine.limits, can_score=False)
    with pytest.raises(ValueError, match="prompt_logprobs need a model that reads whole rows"):
        engine.check("0", [3], SamplingParams(prompt_logprobs=1))
    assert engine.check("0", [3], SamplingParams()).prompt_token_ids == (3,)
