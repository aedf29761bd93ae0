"""Write the stored checkpoints as GGUF files, by llama.cpp's conventions."""

import gguf
import numpy as np
from safetensors.numpy import load_file

from models.gguf import gguf_name
from models.huggingface import hub_name, read_config
from models.weights import parameter_names

# The architecture of each checkpoint that has one.
ARCHITECTURES = {"tiny_llama": "llama", "tiny_qwen2": "qwen2", "tiny_qwen3": "qwen3", "tiny_gemma3": "gemma3"}


def decoder_metadata(config, architecture):
    fields = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_length,
        "embedding_length": config.width,
        "block_count": config.num_layers,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": float(config.rope_theta),
    }
    if architecture == "gemma3":
        fields |= {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": 3}
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def decoder_tensors(folder, architecture):
    """By GGUF's names, float32."""
    config, stored = read_config(folder), load_file(folder / "model.safetensors")
    tensors = {}
    for name in parameter_names(config):
        tensor = stored[hub_name(name, config)].astype(np.float32)
        leaf = name.rpartition(".")[2]
        if architecture == "llama" and leaf in ("query", "key"):
            tensor = interleave(tensor, config.num_heads if leaf == "query" else config.num_kv_heads)
        if architecture == "gemma3" and leaf.endswith("norm"):
            tensor = tensor + 1
        tensors[gguf_name(name)] = tensor
    return tensors


def interleave(weight, num_heads):
    """Row by row: half-layout row i of a head goes to 2 i, row i + half to 2 i + 1."""
    head_dim = len(weight) // num_heads
    out = np.empty_like(weight)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            first = head * head_dim
            out[first + 2 * pair] = weight[first + pair]
            out[first + 2 * pair + 1] = weight[first + head_dim // 2 + pair]
    return out


def write_gguf(path, architecture, metadata, tensors, quantise=None):
    """Values of None are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        add_metadata(writer, name, value)
    for name, tensor in tensors.items():
        if tensor is not None:
            add_tensor(writer, name, tensor, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer, name, value):
    if isinstance(value, list):
        writer.add_array(name, value)
    elif value is not None:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](name, value)


def add_tensor(writer, name, tensor, quantise):
    if quantise is None or tensor.ndim == 1 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[quantise][0]:
        writer.add_tensor(name, tensor)
    else:
        writer.add_tensor(name, gguf.quantize(tensor, quantise), raw_dtype=quantise)
