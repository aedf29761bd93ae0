import dataclasses
import itertools
import json

import pytest
import yaml

from models import LoraConfig
from train.advantages import ADVANTAGES
from train.aggregation import AGGREGATIONS
from train.config import _CHOICES, GRPOConfig
from train.correction import SEQUENCE_RATIOS
from train.data_config import DataConfig
from train.kl import KL_ESTIMATORS
from train.objective import LOSSES
from train.presets import ALGORITHMS, PRESETS, as_published, find_preset
from train.run_config import (
    TRACKERS,
    EvaluationConfig,
    RunConfig,
    SavingConfig,
    WatchConfig,
    mesh_sizes,
    with_values,
)
from train.trackers import TRACKERS as TRACKER_CLASSES


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
        ("clip_epsilon_high", 0.0, "clip_epsilon_high must be > 0 and finite, got 0.0"),
        ("clip_epsilon_high", float("nan"), "clip_epsilon_high must be > 0 and finite, got nan"),
        ("loss", "ppo", "loss must be one of grpo, gspo, gspo-token, cispo, reinforce, got 'ppo'"),
        ("advantages", "gae", r"advantages must be one of grpo, dr-grpo, rloo, reinforce\+\+-baseline, got 'gae'"),
        (
            "aggregation",
            "mean",
            "aggregation must be one of token-mean, seq-mean-token-mean, seq-mean-token-sum, constant-length, "
            "got 'mean'",
        ),
        ("entropy_coefficient", -0.1, "entropy_coefficient must be at least 0 and finite, got -0.1"),
        ("entropy_coefficient", float("inf"), "entropy_coefficient must be at least 0 and finite, got inf"),
        ("kl_coefficient", -0.1, r"kl_coefficient must be at least 0 and finite, got -0\.1"),
        ("kl_coefficient", float("inf"), "kl_coefficient must be at least 0 and finite, got inf"),
        ("kl_estimator", "k4", "kl_estimator must be one of exact, k1, k2, k3, got 'k4'"),
        ("regularize_over", "all", "regularize_over must be one of support, vocabulary, got 'all'"),
        ("max_staleness", -1, "max_staleness must be at least 0 and finite, got -1"),
        ("tis_cap", 0.5, "tis_cap must be at least 1 and finite, got 0.5"),
        ("tis_cap", float("nan"), "tis_cap must be at least 1 and finite, got nan"),
        ("sequence_ratio_min", 1.5, r"sequence_ratio_min must be in \[0, 1\], got 1.5"),
        ("sequence_ratio_max", 0.5, "sequence_ratio_max must be at least 1 and finite, got 0.5"),
        ("sequence_ratio", "mean", "sequence_ratio must be one of geometric-mean, max, got 'mean'"),
        ("overlong_buffer", 17, r"overlong_buffer must be in \[0, 16\], got 17"),
        ("learning_rate", -1.0, r"learning_rate must be in \(0, 1\), got -1.0"),
        ("max_grad_norm", float("nan"), "max_grad_norm must be > 0, got nan"),
        ("schedule", "wsd", "schedule must be one of constant, linear, cosine, got 'wsd'"),
        ("ema_decay", 1.0, r"ema_decay must be in \[0, 1\), got 1.0"),
        ("weight_decay", float("nan"), "weight_decay must be at least 0 and finite, got nan"),
        ("max_refills", -1, "max_refills must be at least 0, got -1"),
        ("reference_every", 3, "reference_every 3 needs a kl_coefficient above 0, got 0"),
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
        ("iterations", 0, "iterations must be at least 1, got 0"),
        ("seed", -1, r"seed must be in \[0, 2\*\*32\), got -1"),
        ("mesh", "data=2,rows=2", r"mesh must be AXIS=SIZE,... .* axes data, fsdp, tensor, got 'data=2,rows=2'"),
        ("mesh", "data=0", "mesh must be"),
        ("mesh", "data=2,data=2", "mesh must be"),
        ("lora_rank", -1, "lora_rank must be at least 0, got -1"),
        ("lora_alpha", 0.0, "lora_alpha must be > 0 and finite, got 0.0"),
        ("lora_targets", ("query", "head"), r"lora_targets must be some of query, .* down, got \('query', 'head'\)"),
        ("lora_targets", (), "lora_targets must be some of"),
        ("compute_dtype", "int8", "compute_dtype must be float32 or bfloat16, got 'int8'"),
        ("base_dtype", "bfloat16", "base_dtype must be float32 without adapters, got 'bfloat16'"),
    ],
)
def test_a_run_out_of_range_is_named(field, value, message, unchecked):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(find_preset("sort-tiny"), **{field: value})


@pytest.mark.parametrize(
    ("record", "field", "value", "message"),
    [
        (SavingConfig(), "checkpoint_every", 0, "checkpoint_every must be at least 1, got 0"),
        (SavingConfig(), "keep_last", 0, "keep_last must be at least 1, got 0"),
        (EvaluationConfig(), "eval_every", -1, "eval_every must be at least 0, got -1"),
        (EvaluationConfig(), "early_stop_patience", 2, "need evaluations: eval_every must be at least 1"),
        (EvaluationConfig(eval_every=1), "early_stop_target", 1.5, r"early_stop_target must be in \(0, 1\], got 1.5"),
        (WatchConfig(), "trackers", ("mlflow",), r"trackers must be some of tensorboard, wandb, got \('mlflow',\)"),
        (WatchConfig(), "num_samples", 0, "num_samples must be at least 1, got 0"),
    ],
)
def test_a_section_out_of_range_is_named(record, field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(record, **{field: value})


def test_a_mesh_is_read_axis_by_axis():
    assert mesh_sizes("data=2, tensor=4") == {"data": 2, "tensor": 4}
    assert mesh_sizes("") == {}


def test_no_field_has_the_name_of_another():
    """The command line drops the sections' names."""
    sections = (RunConfig, GRPOConfig, DataConfig, EvaluationConfig, SavingConfig, WatchConfig)
    names = [field.name for section in sections for field in dataclasses.fields(section)]
    assert len(names) == len(set(names))


def test_adapters_round_trip():
    options = {"lora_rank": 8, "lora_alpha": 16.0, "lora_targets": ("query", "value"), "base_dtype": "bfloat16"}
    options |= {"compute_dtype": "bfloat16", "remat": True}
    config = dataclasses.replace(find_preset("sort-tiny"), **options)
    again = RunConfig.from_json(config.to_json())
    assert again == config
    assert again.lora == LoraConfig(8, 16.0, ("query", "value"))
    assert find_preset("sort-tiny").lora is None


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_json_round_trip(name):
    config = find_preset(name)
    assert config.preset == name
    assert RunConfig.from_json(config.to_json()) == config
    assert with_values(find_preset("sort-tiny"), yaml.safe_load(config.to_yaml())) == config


def test_a_part_of_a_run_changes_that_part():
    changed = with_values(
        find_preset("sort-tiny"),
        yaml.safe_load("seed: 3\ngrpo: {learning_rate: 1e-4, tis_cap: 2}\nwatch: {trackers: [wandb]}\n"),
    )
    preset = find_preset("sort-tiny")
    assert changed == dataclasses.replace(
        preset,
        seed=3,
        grpo=dataclasses.replace(preset.grpo, learning_rate=1e-4, tis_cap=2.0),
        watch=dataclasses.replace(preset.watch, trackers=("wandb",)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: red", "unknown key colour; there is"),
        ("grpo: {top_q: 1}", "unknown key grpo.top_q; there is top_p"),
        ("grpo: {top_p: many}", "top_p must be of type float, got 'many'"),
        ("grpo: 3", "grpo must be a mapping of its fields, got 3"),
        ("grpo: {top_p: 2.0}", r"top_p must be in \(0, 1\], got 2.0"),
        ("watch: {trackers: wandb}", r"trackers must be of type tuple\[str, ...\], got 'wandb'"),
        ("1: 2", "unknown key 1; there is"),
    ],
)
def test_yaml_that_is_not_of_a_run_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        with_values(find_preset("sort-tiny"), yaml.safe_load(text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(colour="red"), r"unknown fields \['colour'\] of RunConfig"),
        (lambda values: values["grpo"].update(beta=1), r"unknown fields \['beta'\] of GRPOConfig"),
        (lambda values: values.pop("iterations"), "RunConfig does not fit.*iterations"),
        (lambda values: values.update(grpo=3), "grpo must be an object of its fields, got 3"),
        (
            lambda values: values.update(lora_targets="query"),
            r"lora_targets must be of type tuple\[str, ...\], got 'query'",
        ),
        (lambda values: values.update(seed=1.5), "seed must be of type int, got 1.5"),
        (lambda values: values["grpo"].update(num_prompts=True), "num_prompts must be of type int, got True"),
        (lambda values: values["grpo"].update(tis_cap="2"), r"tis_cap must be of type float \| None, got '2'"),
        (lambda values: values["grpo"].update(clip_epsilon=None), "clip_epsilon must be of type float, got None"),
        (lambda values: values["grpo"].update(sampling_mask="no"), "sampling_mask must be of type bool, got 'no'"),
    ],
)
def test_json_that_is_not_a_run_is_refused(change, message):
    values = json.loads(find_preset("sort-tiny").to_json())
    change(values)
    with pytest.raises(ValueError, match=message):
        RunConfig.from_json(json.dumps(values))


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"preset must be one of sort-tiny, smollm2-arithmetic, .*, got 'sort'"):
        find_preset("sort")


def test_names_in_the_config_are_those_of_the_functions():
    assert {
        "loss": tuple(LOSSES),
        "advantages": tuple(ADVANTAGES),
        "aggregation": AGGREGATIONS,
        "sequence_ratio": SEQUENCE_RATIOS,
        "kl_estimator": ("exact", *KL_ESTIMATORS),
        "regularize_over": ("support", "vocabulary"),
        "schedule": ("constant", "linear", "cosine"),
    } == _CHOICES
    assert tuple(TRACKER_CLASSES) == TRACKERS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_round_trip_and_keep_the_rest(name):
    preset = find_preset("sort-tiny")
    config = dataclasses.replace(preset, grpo=as_published(preset.grpo, name))
    assert RunConfig.from_json(config.to_json()) == config
    same = {field.name for field in dataclasses.fields(GRPOConfig)} - set(ALGORITHMS[name])
    assert all(getattr(config.grpo, field) == getattr(preset.grpo, field) for field in same)


def test_an_unknown_algorithm_lists_the_known():
    with pytest.raises(ValueError, match=r"algorithm must be one of grpo, dr-grpo, dapo, .*, got 'ppo'"):
        as_published(GRPOConfig(), "ppo")


def test_an_algorithm_leaves_nothing_of_another():
    base = GRPOConfig()
    for first, second in itertools.permutations(ALGORITHMS, 2):
        once, twice = as_published(base, second), as_published(as_published(base, first), second)
        fields = ("loss", "advantages", "aggregation")
        # The papers of these say nothing of one clip or of both.
        fields += {"cispo": (), "rloo": ()}.get(second, ("clip_epsilon", "clip_epsilon_high"))
        assert [getattr(once, field) for field in fields] == [getattr(twice, field) for field in fields]
