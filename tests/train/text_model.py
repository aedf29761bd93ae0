"""A folder with a tiny decoder and a tokenizer of bytes, as a run of a text task loads one."""

from pathlib import Path

from flax import nnx
from letters import make_letters

import models


def write_text_model(folder: Path) -> Path:
    tokenizer = make_letters()
    shape = models.DecoderConfig(
        # Of the tokenizer, and a few rows more, so that eight devices can cut them.
        vocab_size=-(-tokenizer.vocab_size // 8) * 8,
        num_layers=1,
        width=24,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=40,
        rope_theta=1e4,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_length=128,
    )
    models.save(models.Decoder(shape, rngs=nnx.Rngs(0)), folder, tokenizer)
    return folder
