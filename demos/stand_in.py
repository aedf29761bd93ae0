"""A tiny decoder of random weights with a tokenizer of bytes, for runs of text where there is no accelerator."""

from __future__ import annotations

from pathlib import Path

from flax import nnx
from tokenizers.pre_tokenizers import ByteLevel

import models
from models.backends import byte_level_bpe

END = "<end>"


def write(folder: str | Path, *, seed: int = 0) -> Path:
    """Writes it as a folder in the hub's layout, as `models.load` reads one, and returns the folder.

    Args:
      folder: new or empty.
      seed: of the weights.

    Raises:
      FileExistsError: the folder is not empty.
    """
    backend = byte_level_bpe([END, *sorted(ByteLevel.alphabet())], [], [END])
    tokenizer = models.Tokenizer(backend, eos_token_ids=(0,), chat_template="{{ messages[0]['content'] }} ->")
    shape = models.DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        num_layers=1,
        width=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_width=64,
        rope_theta=10_000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_length=256,
    )
    models.save(models.Decoder(shape, rngs=nnx.Rngs(seed)), folder, tokenizer)
    return Path(folder)
