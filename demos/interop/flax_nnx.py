"""Supports in plain Flax (NNX) code: a model, a rollout, a policy gradient: `python demos/interop/flax_nnx.py`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxmask import Sample, SamplingBatch, SamplingParams, sample, support_log_probs

V, D, B, S, T, TEMPERATURE = 1000, 32, 8, 4, 16, 0.8


class LM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, embedding_init=nnx.initializers.normal(0.5), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=D, decode=False, rngs=rngs)

    def hidden(self, tokens):
        x = self.embed(tokens)
        return jax.nn.standardize(0.1 * x + self.attention(x, mask=nnx.make_causal_mask(tokens)))


@nnx.jit
def logits_at(model, tokens, position):
    return model.embed.attend(model.hidden(tokens)[:, position])


def rollout(model: LM, batch: SamplingBatch) -> tuple[jax.Array, Sample]:
    tokens, samples = jnp.full((B, S + T), 7), []
    for t in range(T):
        # Logits as the model gives them: the temperature is one of the settings.
        samples.append(sample(logits_at(model, tokens, S + t - 1), batch, step=t, width=50))
        tokens = tokens.at[:, S + t].set(samples[-1].token_ids)
    return tokens, jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *samples)  # the axes are [B, T]


def loss(model, tokens, drawn, advantages):
    hidden, head = model.hidden(tokens)[:, S - 1 : -1], model.embed.embedding[...]
    kept = support_log_probs(hidden, head, drawn.support, drawn.token_ids, temperature=TEMPERATURE)
    full = -optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T / TEMPERATURE, drawn.token_ids)
    ratio = jnp.exp(kept - drawn.logprobs)
    return -(ratio * advantages).mean(), (ratio.mean(), jnp.exp(full - drawn.logprobs).mean())


def main() -> dict[str, float]:
    model = LM(nnx.Rngs(0))
    settings = [SamplingParams(temperature=TEMPERATURE, top_k=50, top_p=0.9, seed=row) for row in range(B)]
    tokens, drawn = rollout(model, SamplingBatch.from_params(settings, vocab_size=V))
    advantages = drawn.token_ids % 2 - 0.5
    gradients, (kept, full) = nnx.jit(nnx.grad(loss, has_aux=True))(model, tokens, drawn, advantages)
    nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param).update(model, gradients)
    print(f"mean ratio on supports {kept:.6f}, over the vocabulary {full:.6f}")
    return {"kept": float(kept), "full": float(full)}


if __name__ == "__main__":
    main()
