"""Supports in Tunix code: its Qwen 3, its scoring, and ours beside it: `python demos/interop/tunix_grpo.py`.

Tunix scores over the whole vocabulary, whatever a token was drawn from. In a loss of yours, call `support_logps` where
Tunix's calls `common.compute_per_token_logps`; the rest of the loss stays.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl import common

from jaxmask import Sample, SamplingBatch, SamplingParams, sample, support_log_probs

FOLDER = str(Path(__file__).parent / "vllm_tiny")
SIZES = {"num_layers": 2, "embed_dim": 64, "hidden_dim": 64, "num_heads": 4, "head_dim": 32, "num_kv_heads": 1}
V, B, S, T, TEMPERATURE, PAD = 512, 8, 4, 16, 1.2, -1


def hidden_states(model: Qwen3, tokens: jax.Array) -> jax.Array:
    _, positions, mask, _ = common.process_ids(tokens[:, :S], tokens[:, S:], PAD, PAD)
    model(tokens, positions, None, mask, output_hidden_states=True)  # the logits are not used, so never computed
    return nnx.pop(model, nnx.Intermediate)["all_hidden_states"][0]


@nnx.jit
def support_logps(model: Qwen3, tokens: jax.Array, drawn: Sample) -> jax.Array:
    hidden, head = hidden_states(model, tokens)[:, S - 1 : -1], model.embedder.input_embedding[...]
    return support_log_probs(hidden, head, drawn.support, drawn.token_ids, temperature=TEMPERATURE)


def main() -> dict[str, float]:
    config = ModelConfig(vocab_size=V, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True, **SIZES)
    model = create_model_from_safe_tensors(FOLDER, config, dtype=jnp.float32)
    logits_at = nnx.jit(lambda model, tokens, t: model.embedder.decode(hidden_states(model, tokens)[:, t]))
    settings = [SamplingParams(temperature=TEMPERATURE, top_k=50, top_p=0.9, seed=row) for row in range(B)]
    batch, tokens, samples = SamplingBatch.from_params(settings, vocab_size=V), jnp.full((B, S + T), 7), []
    for t in range(T):
        samples.append(sample(logits_at(model, tokens, S + t - 1), batch, step=t, width=50))
        tokens = tokens.at[:, S + t].set(samples[-1].token_ids)
    drawn = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *samples)  # the axes are [B, T]
    prompts_and_completions = tokens[:, :S], tokens[:, S:], PAD, PAD
    tunix = common.compute_per_token_logps(*nnx.split(model), *prompts_and_completions, temperature=TEMPERATURE)
    kept, gradients = nnx.value_and_grad(lambda m: jnp.exp(support_logps(m, tokens, drawn) - drawn.logprobs).mean())(
        model
    )
    nnx.Optimizer(model, optax.sgd(-0.01), wrt=nnx.Param).update(model, gradients)
    full = jnp.exp(tunix - drawn.logprobs).mean()
    print(f"mean ratio on supports {kept:.6f}, by Tunix's own scoring {full:.6f}")
    return {"kept": float(kept), "full": float(full)}


if __name__ == "__main__":
    main()
