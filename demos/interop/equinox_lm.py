"""Supports in Equinox code: a model, a rollout, a policy gradient: `python demos/interop/equinox_lm.py`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from jaxmask import Sample, SamplingBatch, SamplingParams, sample, support_log_probs

V, D, B, S, T, TEMPERATURE = 1000, 32, 8, 4, 16, 0.8


class LM(eqx.Module):
    embed: jax.Array
    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        self.embed = 0.5 * jax.random.normal(key, (V, D))
        self.attention = eqx.nn.MultiheadAttention(num_heads=4, query_size=D, key=key)

    def __call__(self, tokens):
        x, causal = self.embed[tokens], jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        return jax.nn.standardize(0.1 * x + self.attention(x, x, x, mask=causal))


@eqx.filter_jit
def logits_at(model, tokens, position):
    return jax.vmap(model)(tokens)[:, position] @ model.embed.T


def rollout(model: LM, batch: SamplingBatch) -> tuple[jax.Array, Sample]:
    tokens, samples = jnp.full((B, S + T), 7), []
    for t in range(T):
        samples.append(sample(logits_at(model, tokens, jnp.array(S + t - 1)), batch, step=t, width=50))
        tokens = tokens.at[:, S + t].set(samples[-1].token_ids)
    return tokens, jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *samples)  # the axes are [B, T]


def loss(model, tokens, drawn, advantages):
    hidden, head = jax.vmap(model)(tokens)[:, S - 1 : -1], model.embed
    kept = support_log_probs(hidden, head, drawn.support, drawn.token_ids, temperature=TEMPERATURE)
    full = -optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T / TEMPERATURE, drawn.token_ids)
    ratio = jnp.exp(kept - drawn.logprobs)
    return -(ratio * advantages).mean(), (ratio.mean(), jnp.exp(full - drawn.logprobs).mean())


def main() -> dict[str, float]:
    model = LM(jax.random.key(0))
    settings = [SamplingParams(temperature=TEMPERATURE, top_k=50, top_p=0.9, seed=row) for row in range(B)]
    tokens, drawn = rollout(model, SamplingBatch.from_params(settings, vocab_size=V))
    gradient = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))
    gradients, (kept, full) = gradient(model, tokens, drawn, drawn.token_ids % 2 - 0.5)
    model = eqx.apply_updates(model, jax.tree.map(lambda leaf: -0.01 * leaf, gradients))
    print(f"mean ratio on supports {kept:.6f}, over the vocabulary {full:.6f}")
    return {"kept": float(kept), "full": float(full)}


if __name__ == "__main__":
    main()
