import json
from pathlib import Path

import pytest

from models.config import PROJECTIONS, LoraConfig
from models.peft_config import from_peft, to_peft

SAVED = json.loads((Path(__file__).parents[1] / "data" / "tiny_llama_peft" / "adapter_config.json").read_text())


def test_what_is_written_is_read_back():
    for config in (LoraConfig(8, 16.0), LoraConfig(3, 2.5, ("gate", "down"))):
        assert from_peft(json.loads(json.dumps(to_peft(config, "base")))) == config
    assert type(to_peft(LoraConfig(8, 16.0), None)["lora_alpha"]) is int


def test_what_is_written_is_what_peft_knows():
    assert to_peft(LoraConfig(8, 16.0), None).keys() <= SAVED.keys()


def test_the_order_of_modules_does_not_matter():
    modules = ["down_proj", "v_proj", "q_proj", "o_proj", "up_proj", "k_proj", "gate_proj"]
    assert from_peft(SAVED | {"target_modules": modules}).targets == PROJECTIONS


def test_rslora_divides_by_the_root_of_the_rank():
    config = from_peft(SAVED | {"use_rslora": True, "r": 16, "lora_alpha": 8})
    assert config.alpha == 32.0
    assert config.scale == 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' .*'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"r": 0}, "r=0 is not supported, allowed: an integer >= 1"),
        ({"r": None}, "r=None"),
        ({"lora_alpha": "16"}, "lora_alpha='16' is not supported"),
        ({"lora_alpha": 0}, "lora_alpha=0"),
        ({"target_modules": "all-linear"}, "target_modules='all-linear'.*q_proj"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules=.*lm_head"),
        ({"target_modules": [["q_proj"]]}, "target_modules="),
        ({"target_modules": []}, "target_modules="),
        ({"bias": "all"}, "bias='all' is not supported, allowed: 'none'"),
        ({"use_dora": True}, "use_dora=True is not supported, allowed: off"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported, allowed: off"),
        ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern=\{'q_proj': 2\}"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern="),
        ({"layers_to_transform": [0]}, r"layers_to_transform=\[0\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'.*others change the base"),
        ({"a_new_option": 1}, "a_new_option=1 is not supported, allowed: off"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        from_peft(SAVED | change)
