"""A decoder's configuration from the metadata of a GGUF file; their names are llama.cpp's."""

from typing import Any

import numpy as np

from models.config import DecoderConfig, LinearRopeScaling, Llama3RopeScaling, RopeScaling
from models.gguf_file import GGUFFile
from models.layers import rotary_frequencies

HEAD, EMBEDDING, ROPE_FACTORS = "output.weight", "token_embd.weight", "rope_freqs.weight"
# Of Llama 3.1 and 3.2; the stretch is stored as its factors alone, from which these are recognised.
LLAMA3_SCALINGS = tuple(Llama3RopeScaling(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0))
GEMMA_PATTERN, GEMMA_LOCAL_THETA = 6, 10_000.0  # every 6th layer sees all tokens
# Gemma 3 27B has this many layers, and alone scales queries by width / num_heads instead of its head size.
GEMMA_27B_LAYERS = 62


def read_config(file: GGUFFile) -> DecoderConfig:
    """The configuration in the metadata; a value this decoder does not compute is a ValueError."""
    num_heads, width = file.count("attention.head_count"), file.count("embedding_length")
    head_dim = file.count("attention.key_length", width // max(num_heads, 1))
    for name in ("rope.dimension_count", "attention.value_length"):
        file.require(f"{file.architecture}.{name}", (head_dim,), head_dim)
    file.require(f"{file.architecture}.expert_count", (0,), 0)
    rope_theta = float(file.number("rope.freq_base", 10000.0))
    values = {
        "vocab_size": file.count("vocab_size", file.shape(EMBEDDING)[0]),
        "num_layers": file.count("block_count"),
        "width": width,
        "num_heads": num_heads,
        "num_kv_heads": file.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "mlp_width": file.count("feed_forward_length"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(file, head_dim, rope_theta),
        "norm_eps": float(file.number("attention.layer_norm_rms_epsilon")),
        "tie_embeddings": not file.has_tensor(HEAD),
        "attention_bias": file.architecture == "qwen2",
        "qk_norm": file.architecture in ("qwen3", "gemma3"),
        "max_length": file.count("context_length"),
    }
    if file.architecture == "gemma3":
        values |= _gemma_values(file, values)
    else:
        file.require(f"{file.architecture}.attention.sliding_window", (0,), 0)
    try:
        return DecoderConfig(**values)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


def _gemma_values(file: GGUFFile, values: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = values["num_layers"], values["head_dim"]
    pattern = file.count("attention.sliding_window_pattern", GEMMA_PATTERN)
    scalar = values["width"] / values["num_heads"] if num_layers == GEMMA_27B_LAYERS else head_dim
    return {
        "activation": "gelu_tanh",
        "sliding_window": file.count("attention.sliding_window"),
        "full_layers": tuple(layer for layer in range(num_layers) if (layer + 1) % max(pattern, 1) == 0),
        "local_rope_theta": float(file.number("rope.freq_base_swa", GEMMA_LOCAL_THETA)),
        "attention_scale": scalar**-0.5,
        "attention_softcap": file.number("attn_logit_softcapping", 0.0) or None,
        "logit_softcap": file.number("final_logit_softcapping", 0.0) or None,
        "norm_plus_one": True,
        "post_norms": True,
        "scale_embedding": True,
    }


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> RopeScaling | None:
    has_factors = file.has_tensor(ROPE_FACTORS)
    allowed = ("none",) if has_factors else ("none", "linear")
    kind = file.require(f"{file.architecture}.rope.scaling.type", allowed, "none")
    if kind == "linear":
        return LinearRopeScaling(float(file.number("rope.scaling.factor")))
    if not has_factors:
        return None
    factors = file.tensor(ROPE_FACTORS, (head_dim // 2,))[(slice(None),)]
    for scaling in LLAMA3_SCALINGS:
        if np.allclose(factors, rope_factors(head_dim, theta, scaling), rtol=1e-5, atol=0):
            return scaling
    raise ValueError(f"{file.path}: tensor {ROPE_FACTORS!r} is not that of one of {LLAMA3_SCALINGS}")


def rope_factors(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """What a stretch divides each rotary frequency by, [head_dim / 2]: a GGUF file's rope_freqs.weight."""
    return rotary_frequencies(head_dim, theta, None) / rotary_frequencies(head_dim, theta, scaling)
