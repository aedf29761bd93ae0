"""Read a decoder and its tokenizer from a GGUF file; quantised weights are expanded to floats."""

from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from models.decoder import Decoder
from models.gguf_config import EMBEDDING, HEAD, ROPE_FACTORS, read_config
from models.gguf_file import GGUFFile, GGUFTensor
from models.gguf_tokenizer import read_tokenizer
from models.sharding import MeshRules
from models.tokenizer import Tokenizer
from models.weights import fill

TOP_NAMES = {"embedding": EMBEDDING, "final_norm": "output_norm.weight", "lm_head": HEAD}
LAYER_NAMES = {
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "output": "attn_output.weight",
    "query_bias": "attn_q.bias",
    "key_bias": "attn_k.bias",
    "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}


def read_gguf(path: Path, dtype: DTypeLike = jnp.float32, rules: MeshRules | None = None) -> tuple[Decoder, Tokenizer]:
    """The decoder and the tokenizer a GGUF file holds; arguments and errors as in `read_decoder`."""
    file = GGUFFile(path)
    return read_decoder(file, dtype, rules), read_tokenizer(file)


def read_decoder(file: GGUFFile, dtype: DTypeLike = jnp.float32, rules: MeshRules | None = None) -> Decoder:
    """The decoder a GGUF file holds, its weights cast to dtype, and cut over a mesh if rules are given.

    Raises:
      ValueError: the file is damaged, of an unsupported kind, or a tensor is missing, misshapen or unknown.
    """
    config = read_config(file)
    used = {ROPE_FACTORS} if config.rope_scaling is not None else set()

    def read(name: str, shape: tuple[int, ...]) -> GGUFTensor:
        file_name, leaf = gguf_name(name), name.rpartition(".")[2]
        used.add(file_name)
        tensor = file.tensor(file_name, shape)
        if config.norm_plus_one and leaf.endswith("norm"):
            return tensor.less(1.0)
        if file.architecture != "llama" or leaf not in ("query", "key"):
            return tensor
        return tensor.unpermuted(config.num_heads if leaf == "query" else config.num_kv_heads)

    # Before the tree of all layers is built, which takes long where their number is wrong.
    for layer in range(config.num_layers):
        file.tensor(gguf_name(f"layers.{layer}.query"), (config.num_heads * config.head_dim, config.width))
    decoder = fill(config, read, dtype, rules)
    file.refuse_unused(used)
    return decoder


def gguf_name(name: str) -> str:
    """GGUF's name of a parameter: "layers.3.query" is "blk.3.attn_q.weight"."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, index, leaf = name.split(".")
    return f"blk.{index}.{LAYER_NAMES[leaf]}"
