"""Supports in MaxText code: its NNX Transformer, sampled and scored: `python demos/interop/maxtext_decoder.py`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import maxtext
import optax
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.models.models import Transformer
from maxtext.utils.maxtext_utils import create_device_mesh

from jaxmask import SamplingBatch, SamplingParams, sample, support_log_probs

B, S, T, V, TEMPERATURE = 8, 4, 16, 1000, 0.8
BASE = Path(maxtext.__file__).parent / "configs" / "base.yml"
SETTINGS = f"""run_name=jaxmask hardware=cpu skip_jax_distributed_system=true enable_checkpointing=false dtype=float32
 base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=64 base_num_decoder_layers=2 head_dim=32
 vocab_size={V} max_target_length={S + T} per_device_batch_size={B} attention=dot_product logits_via_embedding=true"""


def hidden_and_head(model, tokens):
    """Normed hidden states [B, L, D], and the head's rows [V, D]; untied ones are `model.decoder.logits_dense`'s."""
    positions, segments = jnp.broadcast_to(jnp.arange(S + T), tokens.shape), jnp.ones_like(tokens)
    _, hidden, _ = model.decoder(model.token_embedder, tokens, positions, segments, deterministic=True)
    return 0.3 * model.decoder.decoder_norm(hidden), model.token_embedder.embedding[...]  # 0.3: new weights are sure


def loss(model, tokens, drawn, advantages):
    hidden, head = hidden_and_head(model, tokens)
    hidden = hidden[:, S - 1 : -1]
    kept = support_log_probs(hidden, head, drawn.support, drawn.token_ids, temperature=TEMPERATURE)
    full = -optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T / TEMPERATURE, drawn.token_ids)
    ratio = jnp.exp(kept - drawn.logprobs)
    return -(ratio * advantages).mean(), (ratio.mean(), jnp.exp(full - drawn.logprobs).mean())


def main() -> dict[str, float]:
    config = pyconfig.initialize(["", str(BASE), *SETTINGS.split()])
    mesh = jax.sharding.Mesh(create_device_mesh(config), config.mesh_axes)
    with jax.set_mesh(mesh):
        model, head = Transformer(config, mesh, None, rngs=nnx.Rngs(0)), nnx.jit(hidden_and_head)
        settings = [SamplingParams(temperature=TEMPERATURE, top_k=50, top_p=0.9, seed=row) for row in range(B)]
        batch, tokens, samples = SamplingBatch.from_params(settings, vocab_size=V), jnp.full((B, S + T), 7), []
        for t in range(T):
            hidden, rows = head(model, tokens)
            samples.append(sample(hidden[:, S + t - 1] @ rows.T, batch, step=t, width=50))
            tokens = tokens.at[:, S + t].set(samples[-1].token_ids)
        drawn = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *samples)  # the axes are [B, T]
        gradient = nnx.jit(nnx.grad(loss, has_aux=True))
        gradients, (kept, full) = gradient(model, tokens, drawn, drawn.token_ids % 2 - 0.5)
        nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param).update(model, gradients)
    print(f"mean ratio on supports {kept:.6f}, over the vocabulary {full:.6f}")
    return {"kept": float(kept), "full": float(full)}


if __name__ == "__main__":
    main()
