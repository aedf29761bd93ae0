"""Translate between `LoraConfig` and the object of PEFT's `adapter_config.json`."""

import math
from typing import Any

from models.config import LoraConfig, require

PEFT_NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
# Fields that change no number of a trained adapter: records, and what matters in training or for other kinds only.
IGNORED = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
# Ways to start an adapter that leave the base as it was; the others (PiSSA, OLoRA, LoftQ) change it.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
# Fields read below; every other one must be off.
READ = ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights")


def to_peft(lora: LoraConfig, base_model_name: str | None) -> dict[str, Any]:
    """The object of an `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "revision": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "target_modules": [PEFT_NAMES[name] for name in lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }


def from_peft(content: dict[str, Any]) -> LoraConfig:
    """The adapters an `adapter_config.json` describes.

    With `use_rslora` B A is multiplied by lora_alpha / sqrt(r), so alpha is lora_alpha sqrt(r).

    Raises:
      ValueError: a field is missing, has a value no adapter can be built from, or asks for what is not supported.
    """
    require(content.get("peft_type") == "LORA", "peft_type", content.get("peft_type"), "'LORA'")
    task = content.get("task_type")
    require(task in (None, "CAUSAL_LM"), "task_type", task, "'CAUSAL_LM'")
    require(content.get("bias", "none") == "none", "bias", content.get("bias"), "'none'")
    start = content.get("init_lora_weights", True)
    require(start in PLAIN_STARTS, "init_lora_weights", start, f"one of {PLAIN_STARTS}: others change the base")
    for name in sorted(content.keys() - set(READ) - set(IGNORED)):
        require(not content[name], name, content[name], "off")
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"r={rank!r} is not supported, allowed: an integer >= 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise ValueError(f"lora_alpha={alpha!r} is not supported, allowed: a finite number > 0")
    scaled = alpha * math.sqrt(rank) if content.get("use_rslora") else float(alpha)
    return LoraConfig(rank, scaled, _targets(content.get("target_modules")))


def _targets(modules: Any) -> tuple[str, ...]:
    allowed = f"a list of some of {tuple(PEFT_NAMES.values())}"
    is_list = isinstance(modules, list) and bool(modules)
    require(is_list and all(module in PEFT_NAMES.values() for module in modules), "target_modules", modules, allowed)
    return tuple(ours for ours, theirs in PEFT_NAMES.items() if theirs in modules)
