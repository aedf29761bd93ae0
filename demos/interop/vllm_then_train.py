"""Sample with vLLM, train with jaxmask's learner: real answers of `/inference/v1/generate`, and the model they are of.

    python demos/interop/vllm_then_train.py

`vllm_tiny/responses.jsonl` holds four requests of four completions each, as they went over the wire, and
`vllm_tiny` is the checkpoint that vLLM had loaded. The weights are the same, so the ratio of the first pass is 1 if
both sides mean the same by a log-probability. Over the whole vocabulary it is not.
"""

import json
from pathlib import Path

import jax

import models
import train
from jaxmask import Rollout, rollout_from_vllm
from train.tasks import Rewards

FOLDER = Path(__file__).parent / "vllm_tiny"


def receive() -> Rollout:
    """What vLLM sampled, checked token by token."""
    exchanges = [json.loads(line) for line in (FOLDER / "responses.jsonl").read_text().splitlines()]
    requests = [exchange["request"] for exchange in exchanges]
    responses = [exchange["response"] for exchange in exchanges]
    return rollout_from_vllm(requests, responses, vocab_size=512, width=32)


def step(rollout: Rollout, *, sampling_mask: bool) -> train.Metrics:
    """One GRPO step from the weights that vLLM had, and what was seen on its first pass."""
    config = train.GRPOConfig(num_prompts=4, group_size=4, max_new_tokens=20, sampling_mask=sampling_mask)
    optimizer = train.make_optimizer(config, num_iterations=1)
    policy, _ = models.load(FOLDER)
    state = train.init_state(policy, optimizer, seed=0)
    # A reward of your own stands here: one number for each completion.
    share = (rollout.token_ids % 2 == 0).mean(axis=1)
    rewards = Rewards(share, share == 1)
    grpo_step = jax.jit(train.grpo_step, static_argnames=("config", "optimizer"))
    _, metrics = grpo_step(state, rollout, rewards, config=config, optimizer=optimizer)
    return metrics


def main() -> dict[str, float]:
    """Prints both ratios, and returns them."""
    rollout = receive()
    sizes = rollout.support.counts[rollout.token_mask]
    print(f"{sizes.size} tokens from vLLM, {sizes.mean():.1f} ids in a support on average")
    kept, full = (step(rollout, sampling_mask=keep) for keep in (True, False))
    print(f"on supports:         mean ratio {kept.ratio_mean:.6f}, largest error {kept.max_ratio_error:.1e}")
    print(f"over the vocabulary: mean ratio {full.ratio_mean:.6f}, largest error {full.max_ratio_error:.1e}")
    return {"kept": float(kept.ratio_mean), "full": float(full.ratio_mean), "error": float(kept.max_ratio_error)}


if __name__ == "__main__":
    main()
