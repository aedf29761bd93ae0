"""Read a decoder from a folder in the hub's layout: config.json and safetensors, in one file or in shards."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from models.config import DecoderConfig
from models.decoder import Decoder
from models.files import read_json
from models.hub_config import from_hub
from models.sharding import MeshRules
from models.weights import fill

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
STORED_DTYPES = ("BF16", "F16", "F32")
ROWS_AT_ONCE = 4096  # of two large tensors that are compared

TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
POST_NORM_NAMES = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an open safetensors file.

    Attributes:
      path: the file, for messages.
      name: the tensor's name in it.
      handle: the open file.
    """

    path: Path
    name: str
    handle: Any

    def checked(self, shape: tuple[int, ...]) -> "StoredTensor":
        """The tensor itself.

        Raises:
          ValueError: the stored shape or dtype is not the expected one.
        """
        header = self.handle.get_slice(self.name)
        found, dtype = tuple(header.get_shape()), header.get_dtype()
        if found != shape:
            raise ValueError(f"{self.path}: tensor {self.name!r} must have shape {shape}, it has {found}")
        if dtype not in STORED_DTYPES:
            raise ValueError(f"{self.path}: tensor {self.name!r} has dtype {dtype}, allowed: {STORED_DTYPES}")
        return self

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray:
        """One piece, in the stored dtype; nothing else is read."""
        return self.handle.get_slice(self.name)[index]


def read_folder(folder: Path, dtype: DTypeLike = jnp.float32, rules: MeshRules | None = None) -> Decoder:
    """The decoder a hub folder describes, its weights cast to dtype, and cut over a mesh if rules are given.

    Raises:
      FileNotFoundError: config.json or the weights are not there.
      ValueError: a file is damaged, the model is of an unsupported kind, or a tensor is missing, misshapen or unknown.
    """
    config = read_config(folder)
    with ExitStack() as stack:
        stored = _open_all(folder, stack)

        def read(name: str, shape: tuple[int, ...]) -> StoredTensor:
            file_name = hub_name(name, config)
            if file_name not in stored:
                raise ValueError(f"{folder}: tensor {file_name!r} with shape {shape} is missing from the weights")
            used.add(file_name)
            return stored[file_name].checked(shape)

        used: set[str] = set()
        # Before the tree of all layers is built, which takes long where their number is wrong.
        for layer in range(config.num_layers):
            read(f"layers.{layer}.query", (config.num_heads * config.head_dim, config.width))
        decoder = fill(config, read, dtype, rules)
        _refuse_unused(stored, used, config)
    return decoder


def read_config(folder: Path) -> DecoderConfig:
    """The configuration in a folder's config.json; raises as `read_folder`."""
    path = folder / "config.json"
    content = read_json(path)
    try:
        return from_hub(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def hub_name(name: str, config: DecoderConfig) -> str:
    """The hub's name of a parameter: "layers.3.query" is "model.layers.3.self_attn.q_proj.weight"."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, index, leaf = name.split(".")
    # Gemma's files call the second norm of a block by the name that others give to the third.
    names = LAYER_NAMES | POST_NORM_NAMES if config.post_norms else LAYER_NAMES
    return f"model.layers.{index}.{names[leaf]}"


def _open_all(folder: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for path, expected in _weight_files(folder).items():
        handle = stack.enter_context(open_safetensors(path))
        found = list(handle.keys())
        missing = sorted(expected - set(found))
        if missing:
            raise ValueError(f"{path} has no tensor {missing[0]!r}, which {INDEX_FILE} says it has")
        for name in found:
            if name in stored:
                raise ValueError(f"{path}: tensor {name!r} is in {stored[name].path.name} too")
            stored[name] = StoredTensor(path, name, handle)
    return stored


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """The files, and the tensors an index says they hold."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: set()}
    index = folder / INDEX_FILE
    if not index.is_file():
        raise FileNotFoundError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no 'weight_map' from tensor to file")
    files: dict[Path, set[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(f"{index}: tensor {name!r} is in {file_name!r}, allowed: the name of a file beside it")
        files.setdefault(folder / file_name, set()).add(name)
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {path.name}, which {INDEX_FILE} names")
    return files


def open_safetensors(path: Path) -> Any:
    """An open safetensors file, a context manager; a damaged one is a ValueError."""
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


def _refuse_unused(stored: dict[str, StoredTensor], used: set[str], config: DecoderConfig) -> None:
    # Old checkpoints store the rotary frequencies, which follow from the configuration.
    unused = sorted(name for name in stored if name not in used and not name.endswith("rotary_emb.inv_freq"))
    if config.tie_embeddings and unused == [TOP_NAMES["lm_head"]]:
        return _check_tied_head(stored, config)
    if unused:
        first = stored[unused[0]]
        raise ValueError(f"{first.path}: {len(unused)} tensors belong to no parameter, the first is {first.name!r}")
    return None


def _check_tied_head(stored: dict[str, StoredTensor], config: DecoderConfig) -> None:
    # Some tied checkpoints (Qwen 3 0.6B) store the head again; a different one would change every logit.
    shape = (config.vocab_size, config.width)
    head, embedding = (stored[TOP_NAMES[name]].checked(shape) for name in ("lm_head", "embedding"))
    for first in range(0, config.vocab_size, ROWS_AT_ONCE):
        rows = (slice(first, min(first + ROWS_AT_ONCE, config.vocab_size)), slice(None))
        if not np.array_equal(head[rows], embedding[rows]):
            raise ValueError(f"{head.path}: {head.name!r} differs from the embedding, but tie_word_embeddings is true")
