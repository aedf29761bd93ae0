"""Read a decoder and its tokenizer from a GGUF file; quantised weights are expanded to floats.

Only the "llama" architecture with plain rotary is read.
"""

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.config import DecoderConfig
from models.decoder import Decoder
from models.gguf_tokenizer import read_tokenizer
from models.tokenizer import Tokenizer
from models.weights import fill

ARCHITECTURES = ("llama",)

TOP_NAMES = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
LAYER_NAMES = {
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "output": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


class GGUFFile:
    """An open GGUF file: checked access to its metadata and tensors."""

    def __init__(self, path: Path):
        """Parse the header; tensors stay on disk until they are read.

        Raises:
          ValueError: the file is damaged or of an unsupported architecture.
        """
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise ValueError(f"{path} is not a whole GGUF file: {error}") from None
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.require("general.architecture", ARCHITECTURES)

    def metadata(self, name: str, default: Any = None) -> Any:
        """The value of a metadata field; a missing field without a default is a ValueError."""
        if name in self._fields:
            return self._fields[name].contents()
        if default is None:
            raise ValueError(f"{self.path}: metadata field {name!r} is missing")
        return default

    def require(self, name: str, allowed: tuple, default: Any = None) -> Any:
        """As `metadata`, for a field whose value must be one of those allowed."""
        value = self.metadata(name, default)
        if value not in allowed:
            raise ValueError(f"{self.path}: {name}={value!r} is not supported, allowed: {allowed}")
        return value

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of that name."""
        return name in self._tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor as float32, one row per output; a missing or misshapen one is a ValueError."""
        if name not in self._tensors:
            raise ValueError(f"{self.path}: tensor {name!r} with shape {shape} is missing")
        tensor = self._tensors[name]
        # GGUF lists the fastest axis first.
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise ValueError(f"{self.path}: tensor {name!r} must have shape {shape}, it has {found}")
        try:
            return gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: tensor {name!r} has type {kind}, which gguf cannot expand") from None

    def refuse_unused(self, used: set[str]) -> None:
        """Raise a ValueError if a tensor belongs to no parameter (rope_freqs, experts, biases)."""
        unused = sorted(set(self._tensors) - used)
        if unused:
            raise ValueError(f"{self.path}: {len(unused)} tensors belong to no parameter, the first is {unused[0]!r}")


def read_gguf(path: Path, dtype: DTypeLike = jnp.float32) -> tuple[Decoder, Tokenizer]:
    """The decoder and the tokenizer a GGUF file holds, weights cast to dtype.

    Raises:
      ValueError: the file is damaged, of an unsupported kind, or a tensor is missing, misshapen or unknown.
    """
    file = GGUFFile(path)
    config = read_config(file)
    used: set[str] = set()

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        file_name, leaf = gguf_name(name), name.rpartition(".")[2]
        used.add(file_name)
        tensor = file.tensor(file_name, shape)
        num_heads = {"query": config.num_heads, "key": config.num_kv_heads}.get(leaf)
        return tensor if num_heads is None else unpermute(tensor, num_heads)

    decoder = fill(config, read, dtype)
    file.refuse_unused(used)
    return decoder, read_tokenizer(file)


def read_config(file: GGUFFile) -> DecoderConfig:
    """The configuration in the metadata; a value this decoder does not compute is a ValueError."""
    prefix = file.architecture
    num_heads = file.metadata(f"{prefix}.attention.head_count")
    width = file.metadata(f"{prefix}.embedding_length")
    head_dim = file.metadata(f"{prefix}.attention.key_length", width // num_heads)
    file.require(f"{prefix}.rope.dimension_count", (head_dim,), head_dim)
    file.require(f"{prefix}.attention.value_length", (head_dim,), head_dim)
    file.require(f"{prefix}.rope.scaling.type", ("none",), "none")
    file.require(f"{prefix}.expert_count", (0,), 0)
    return DecoderConfig(
        vocab_size=file.metadata(f"{prefix}.vocab_size"),
        num_layers=file.metadata(f"{prefix}.block_count"),
        width=width,
        num_heads=num_heads,
        num_kv_heads=file.metadata(f"{prefix}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_width=file.metadata(f"{prefix}.feed_forward_length"),
        rope_theta=float(file.metadata(f"{prefix}.rope.freq_base", 10000.0)),
        rope_scaling=None,
        norm_eps=float(file.metadata(f"{prefix}.attention.layer_norm_rms_epsilon")),
        tie_embeddings=not file.has_tensor(TOP_NAMES["lm_head"]),
        max_length=file.metadata(f"{prefix}.context_length"),
    )


def gguf_name(name: str) -> str:
    """GGUF's name of a parameter: "layers.3.query" is "blk.3.attn_q.weight"."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, index, leaf = name.split(".")
    return f"blk.{index}.{LAYER_NAMES[leaf]}"


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows of each head from llama.cpp's interleaved rotary pairs to the halves `layers.rotate` turns.

    In: rows [a0, b0, a1, b1] of one head  Out: [a0, a1, b0, b1]
    """
    num_rows, width = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)
