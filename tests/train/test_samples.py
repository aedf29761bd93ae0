import json

import jax.numpy as jnp
import numpy as np

from jaxmask import Finish, Rollout, SamplingBatch, SamplingParams, Support
from train import samples
from train.tasks import Rewards

V, T = 20, 2
LISTS = [[3], list(range(12)), [5, 7], []]
ROLLOUT = Rollout(
    prompt_ids=jnp.array([[1, 2]], jnp.int32),
    prompt_lengths=jnp.array([2], jnp.int32),
    token_ids=jnp.array([[3, 11], [7, 0]], jnp.int32),
    lengths=jnp.array([2, 1], jnp.int32),
    logprobs=jnp.array([[0.0, -1.5], [-0.5, 0.0]], jnp.float32),
    support=Support.from_lists(LISTS, V).reshape(2, T),
    finish=jnp.array([Finish.LENGTH, Finish.STOP], jnp.int32),
    sampling=SamplingBatch.from_params([SamplingParams(top_k=12, seed=0)] * 2, vocab_size=V),
    group_size=2,
)
REWARDS = Rewards(np.array([0.5, 1.0], np.float32), np.array([False, True]))


def show(token_ids):
    return "".join(f"<{token_id}>" for token_id in token_ids)


def test_a_sample_says_what_each_token_was_drawn_from(tmp_path):
    samples.write(tmp_path / "samples.jsonl", 7, samples.describe(ROLLOUT, REWARDS, show, 5))
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 7,
        "prompt": "<1><2>",
        "completion": "<3><11>",
        "reward": 0.5,
        "exact": False,
        "finish_reason": "length",
        "tokens": ["<3>", "<11>"],
        "token_ids": [3, 11],
        "logprobs": [0.0, -1.5],
        "sampling_mask": [[3], list(range(12))],
        "mask_tokens": [["<3>"], [f"<{token_id}>" for token_id in range(8)]],
    }
