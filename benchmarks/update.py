"""How much of a GRPO update is the head: SmolLM2-135M's shape (30 layers, D = 576, V = 49,152), random weights.

python benchmarks/update.py [--rows 8] [--prompt 32] [--completion 96] [--layers 30] [--rounds 3]

    body         gradient of a loss on the hidden states alone: no head
    dense        the GRPO loss on logits [N, V] at once, masked log-softmax
    by tokens    the same in chunks of 256 tokens, recomputed in the backward pass
    ours         `train.gradients.accumulate`, on the supports

Supports are sized as rollouts have them (see learner.py). The head's share is what a program takes beyond the body.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import learner
import numpy as np
from flax import nnx
from gpu_timed import support_sizes
from timing import in_turn

from jaxmask import SamplingBatch, SamplingParams, Support
from jaxmask.rollout import Rollout
from models import Decoder, DecoderConfig
from train.config import GRPOConfig
from train.gradients import Learner, accumulate, hidden_states
from train.losses import LossInputs, grpo_loss
from train.rows import LearnerRows, learner_rows

VOCAB = 49_152


def make_model(num_layers: int) -> Decoder:
    shape = DecoderConfig(
        vocab_size=VOCAB,
        num_layers=num_layers,
        width=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_width=1536,
        rope_theta=1e5,
        rope_scaling=None,
        norm_eps=1e-5,
        tie_embeddings=True,
    )
    return Decoder(shape, rngs=nnx.Rngs(0))


def make_rows(num_rows: int, prompt: int, completion: int) -> LearnerRows:
    rng = np.random.default_rng(0)
    sizes = rng.permutation(support_sizes(num_rows * completion))
    lists = [rng.choice(VOCAB, size, replace=False).tolist() for size in sizes]
    support = Support.from_lists(lists, VOCAB).reshape(num_rows, completion)
    token_ids = jnp.asarray(np.array([ids[0] for ids in lists], np.int32).reshape(num_rows, completion))
    logprobs = jnp.asarray(np.where(sizes > 1, -1.0, 0.0).astype(np.float32).reshape(num_rows, completion))
    params = [SamplingParams(top_k=100, max_tokens=completion, seed=row) for row in range(num_rows)]
    full = jnp.full(num_rows, completion, jnp.int32)
    prompts = jnp.asarray(rng.integers(0, VOCAB, (num_rows, prompt)), jnp.int32), jnp.full(num_rows, prompt, jnp.int32)
    batch = SamplingBatch.from_params(params, vocab_size=VOCAB)
    rollout = Rollout(*prompts, token_ids, full, logprobs, support, full, batch)
    return learner_rows(rollout, jnp.asarray(np.linspace(-1, 1, num_rows), jnp.float32))


def over_the_vocabulary(score: Callable[..., jax.Array]) -> Callable[[Decoder, LearnerRows], Decoder]:
    def loss(model: Decoder, rows: LearnerRows) -> jax.Array:
        hidden = hidden_states(model, rows)
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (hidden, rows.support, rows.sampled_ids))
        logprobs = score(flat[0], model.head, *flat[1:]).reshape(rows.sampled_ids.shape)
        inputs = LossInputs(logprobs, rows.behaviour_logprobs, rows.advantages, rows.loss_mask)
        return grpo_loss(inputs, clip_epsilon=0.2).total / rows.sampled_ids.size

    return jax.grad(loss)


def body(model: Decoder, rows: LearnerRows) -> Decoder:
    return jax.grad(lambda model: hidden_states(model, rows).sum() / rows.sampled_ids.size)(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--completion", type=int, default=96, help="rows times this: a multiple of 256")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model, rows = make_model(options.layers), make_rows(options.rows, options.prompt, options.completion)
    config = GRPOConfig(num_prompts=1, group_size=options.rows, max_new_tokens=options.completion)
    rivals = {
        "body": body,
        "dense": over_the_vocabulary(learner.dense),
        "by tokens": over_the_vocabulary(learner.by_tokens),
        "ours": lambda model, rows: accumulate(model, rows, Learner(config))[0],
    }
    programs = {name: jax.jit(run).lower(model, rows).compile() for name, run in rivals.items()}
    times = in_turn({name: lambda p=program: p(model, rows) for name, program in programs.items()}, options.rounds)
    num_tokens = options.rows * options.completion
    print(f"SmolLM2-135M's shape, {options.layers} layers, {num_tokens} sampled tokens, float32, forward and backward")
    for name, program in programs.items():
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        share = max(times[name] - times["body"], 0.0) / times[name]
        print(f"{name:10} {times[name]:9.0f} ms, head {100 * share:5.1f} %, temporaries {memory:7.0f} MiB")


if __name__ == "__main__":
    main()
