"""Weights of a decoder small enough to compile fast, as learners would write them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import models

CONFIG = models.DecoderConfig(
    vocab_size=50,
    num_layers=1,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=24,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_length=64,
)


def decoder(seed, **changes):
    """Random weights, large enough that two of them answer differently."""
    noise = np.random.default_rng(seed)
    made = models.Decoder(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(seed))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.5 * noise.standard_normal(leaf.shape), jnp.float32), made)


def with_number(made, value):
    """The same weights with one number in their midst set."""

    def change(path, leaf):
        is_place = "down" in jax.tree_util.keystr(path)
        return leaf.at[3, 5].set(value) if is_place else leaf

    return jax.tree_util.tree_map_with_path(change, made)


def damaged(folder):
    """The folder with the end of its weights cut off."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def edited(folder, **fields):
    """The folder with other fields in its configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
