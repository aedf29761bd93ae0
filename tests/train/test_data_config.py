import dataclasses

import pytest

from train.data_config import DataConfig


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"task": "sort", "task_options": ("num_digits=3",)},
        {"task": "arithmetic", "task_options": ("num_digits=4",)},
        {"task": "countdown", "task_options": ("num_numbers=4", "max_number=20")},
        {"task": "chain-sum", "task_options": ("enable_thinking=false",), "rewards": ("answer=2", "my.py:f")},
        {"task": "gsm8k", "train_file": "train.jsonl", "eval_file": "test.jsonl", "max_prompt_length": 1},
        {"task": "reasoning-gym:chain_sum", "task_options": ("min_terms=2", "max_terms=3", "allow_negation=true")},
        {"task": "reasoning-gym:basic_arithmetic", "task_options": ("operators=['+', '*']",)},
        {"task": "reasoning-gym:composite", "task_options": ("datasets={'gcd': {}, 'chain_sum': {'max_terms': 3}}",)},
    ],
)
def test_what_can_be_asked(values):
    config = DataConfig(**values)
    assert dataclasses.replace(config) == config
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"task": "sorting"},
            "task must be one of sort, arithmetic, countdown, chain-sum, gsm8k, reasoning-gym:NAME, got",
        ),
        ({"task": "reasoning-gym:chainsum"}, "data sets, like chain_sum"),
        ({"task": "reasoning-gym:"}, "data sets, such as ab, acre"),
        ({"task_options": ("num_digits",)}, "task_options must be written key=value, got 'num_digits'"),
        ({"task_options": ("digits=3",)}, "task_options of sort must be among num_digits, got 'digits=3'"),
        ({"task_options": ("num_digits=3", "num_digits=4")}, "must name 'num_digits' once"),
        ({"task_options": ("num_digits=1",)}, "num_digits must be an integer in .2, 1000., got 1"),
        ({"task": "arithmetic", "task_options": ("num_digits=9",)}, "num_digits must be an integer in .1, 8., got 9"),
        ({"task": "chain-sum", "task_options": ("num_terms=3",)}, "must be among enable_thinking, got"),
        ({"task": "chain-sum", "task_options": ("enable_thinking=2",)}, "enable_thinking must be true or false, got 2"),
        ({"task": "reasoning-gym:gcd", "task_options": ("seed=1",)}, "must be among enable_thinking, min_numbers"),
        (
            {"task": "reasoning-gym:gcd", "task_options": ("min_numbers=0",)},
            "reasoning-gym:gcd {'min_numbers': 0} are ref",
        ),
        (
            {"task": "reasoning-gym:gcd", "task_options": ("min_numbers=a",)},
            "reasoning-gym:gcd {'min_numbers': 'a'} are",
        ),
        ({"task": "reasoning-gym:composite"}, "task_options of reasoning-gym:composite {} are refused"),
        ({"task": "gsm8k"}, "train_file must be a file of JSON lines with task 'gsm8k', got None"),
        ({"train_file": "a.jsonl"}, "train_file must be None with task 'sort', got 'a.jsonl'"),
        ({"eval_file": "a.jsonl"}, "eval_file must be None with task 'sort'"),
        ({"rewards": ("my.py:f",)}, "rewards must be 'answer' with task 'sort', got my.py:f"),
        ({"instruction": "Hurry."}, "instruction must be None with task 'sort'"),
        ({"task": "chain-sum", "rewards": ()}, "rewards must name at least one function"),
        ({"task": "chain-sum", "max_prompt_length": 0}, "max_prompt_length must be at least 1, got 0"),
        ({"reward_workers": 0}, "reward_workers must be at least 1, got 0"),
        ({"reward_timeout": 0.0}, "reward_timeout must be > 0 and finite, got 0.0"),
        ({"reward_timeout": float("nan")}, "reward_timeout must be > 0 and finite, got nan"),
    ],
)
def test_what_cannot_is_refused_with_field_value_and_range(values, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)


def test_values_of_another_type_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"num_digits must be an integer in .2, 1000., got 'many'"):
        DataConfig(task_options=("num_digits=many",))
