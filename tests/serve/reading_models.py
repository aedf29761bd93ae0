"""The known model, able to read on after a beginning, and tiny decoders: for prompts read bit by bit or kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from engine_models import Known, known_model
from flax import nnx
from mock_model import Memory

import models


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept(Memory):
    """A `Memory` whose rows can be taken."""

    keeps_all = True

    def take_row(self, row, num_tokens, *, capacity, chunk_size):
        states = jax.lax.dynamic_slice_in_dim(self.states, row, 1)[:, : capacity + 1]
        states = jnp.pad(states, ((0, 0), (0, capacity + 1 - states.shape[1])))
        is_kept = jnp.arange(capacity + 1, dtype=jnp.int32)[None] <= num_tokens
        return Kept(jnp.where(is_kept, states, 0), num_tokens[None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reader(Known):
    """A `Known` with `extend`."""

    def extend(self, token_ids, counts, cache):
        for column in range(token_ids.shape[1]):
            cache = self._read(cache, token_ids[:, column], column < counts)
        return jnp.zeros((*token_ids.shape, 1)), cache

    def _read(self, cache, token_ids, is_read):
        memory = super()._read(cache, token_ids, is_read)
        return Kept(memory.states, memory.lengths)


def reader(seed=0, max_length=64):
    return Reader(known_model(seed).table, max_length)


def tiny_decoder(seed=0, **changes):
    """Large enough weights that a wrong position shows; layers with windows where `changes` say so."""
    config = models.DecoderConfig(
        vocab_size=50,
        num_layers=2,
        width=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=24,
        rope_theta=1e4,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_length=64,
    )
    noise = np.random.default_rng(seed)
    decoder = models.Decoder(dataclasses.replace(config, **changes), rngs=nnx.Rngs(seed))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.5 * noise.standard_normal(leaf.shape), jnp.float32), decoder)
