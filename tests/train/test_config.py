import dataclasses
import json

import pytest

from train.config import GRPOConfig, RunConfig
from train.presets import PRESETS, find_preset


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_k", 0, "sampling distribution replay requires top_k > 0"),
        ("temperature", 0.0, "sampling distribution replay requires temperature > 0"),
        ("min_p", 1.5, r"min_p must be in \[0, 1\], got 1.5"),
        ("max_new_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("group_size", 1, "group_size must be at least 2, got 1"),
        ("num_prompts", 0, "num_prompts must be at least 1, got 0"),
        ("clip_epsilon", float("nan"), r"clip_epsilon must be in \(0, 1\), got nan"),
        ("learning_rate", -1.0, r"learning_rate must be in \(0, 1\), got -1.0"),
        ("max_grad_norm", float("nan"), "max_grad_norm must be > 0, got nan"),
        ("schedule", "linear", "schedule must be one of constant, cosine, got 'linear'"),
        ("warmup_iterations", -1, "warmup_iterations must be at least 0, got -1"),
        ("num_micro_batches", 3, r"num_micro_batches must divide num_prompts \* group_size = 512, got 3"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_values_out_of_range_are_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GRPOConfig(), **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("task", "chess", "task must be one of sort, chain-sum, got 'chess'"),
        ("iterations", 0, "iterations must be at least 1, got 0"),
        ("seed", -1, r"seed must be in \[0, 2\*\*32\), got -1"),
        ("checkpoint_every", 0, "checkpoint_every must be at least 1, got 0"),
    ],
)
def test_a_run_out_of_range_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(find_preset("sort-tiny"), **{field: value})


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_json_round_trip(name):
    config = find_preset(name)
    assert config.preset == name
    assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(colour="red"), r"unknown fields \['colour'\] of RunConfig"),
        (lambda values: values["grpo"].update(beta=1), r"unknown fields \['beta'\] of GRPOConfig"),
        (lambda values: values.pop("task"), "RunConfig does not fit.*task"),
        (lambda values: values.update(grpo=3), "an object under 'grpo'"),
        (lambda values: values.update(seed=1.5), "seed must be of type int, got 1.5"),
        (lambda values: values["grpo"].update(num_prompts=True), "num_prompts must be of type int, got True"),
        (lambda values: values["grpo"].update(sampling_mask="no"), "sampling_mask must be of type bool, got 'no'"),
    ],
)
def test_json_that_is_not_a_run_is_refused(change, message):
    values = json.loads(find_preset("sort-tiny").to_json())
    change(values)
    with pytest.raises(ValueError, match=message):
        RunConfig.from_json(json.dumps(values))


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match="preset must be one of sort-tiny, smollm2-arithmetic, got 'sort'"):
        find_preset("sort")
