"""Write a decoder as a folder in the hub's layout, which transformers and everyone else can load.

Adapters are not written: merge them first.
"""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.config import require_count
from models.decoder import Decoder
from models.export_config import to_hub
from models.huggingface import INDEX_FILE, SINGLE_FILE, hub_name
from models.tokenizer import Tokenizer
from models.weights import named_parameters

# Names of a dtype in a safetensors file.
STORED_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
GENERATION_FILE = "generation_config.json"


def save(
    decoder: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write config.json, generation_config.json, safetensors and the tokenizer's files into a new folder.

    The files are written beside it and renamed at the end: the folder is whole, or it is not there. One tensor at a
    time is on the host, gathered from the devices that hold its pieces.

    Args:
      decoder: whole or cut over a mesh of this process; its arrays may be NumPy's.
      folder: made here; it may exist if it is empty.
      tokenizer: its files are written too; without one, the folder names no end of reply.
      dtype: of the stored weights, float32, bfloat16 or float16; None: as they are.
      max_shard_bytes: weights of more are stored in several files with an index.

    Raises:
      FileExistsError: the folder is not empty, or is a file.
      ValueError: the decoder has adapters, or no hub family computes what it computes, or an argument is not allowed.
    """
    # Through a link, so that what is renamed in the end takes the place of what it points at.
    folder = Path(folder).resolve()
    require_count("max_shard_bytes", max_shard_bytes)
    dtype = decoder.final_norm.dtype if dtype is None else jnp.dtype(dtype)
    if dtype.name not in STORED_NAMES:
        raise ValueError(f"dtype={dtype.name!r} is not supported, allowed: one of {tuple(STORED_NAMES)}")
    config = to_hub(decoder.config, dtype.name) | _token_ids(tokenizer)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} must be new or an empty folder, it is not: nothing is overwritten")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        partial.mkdir()
        _write_json(partial / "config.json", config)
        if tokenizer is not None:
            tokenizer.save(partial)
        if not (partial / GENERATION_FILE).exists():
            _write_json(partial / GENERATION_FILE, _token_ids(tokenizer))
        _write_weights(partial, decoder, dtype, max_shard_bytes)
        _flush(partial)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    # Null rather than absent: transformers would take its families' own ids, which are other models'.
    if tokenizer is None:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    ids = list(tokenizer.eos_token_ids)
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ids if len(ids) > 1 else next(iter(ids), None),
        "pad_token_id": tokenizer.pad_token_id,
    }


def _write_weights(folder: Path, decoder: Decoder, dtype: np.dtype, max_shard_bytes: int) -> None:
    leaves = {hub_name(name, decoder.config): leaf for name, leaf in named_parameters(decoder).items()}
    shards: list[dict[str, jax.Array]] = [{}]
    size = 0
    for name, leaf in leaves.items():
        if shards[-1] and size + leaf.size * dtype.itemsize > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = leaf
        size += leaf.size * dtype.itemsize
    if len(shards) == 1:
        return _write_shard(folder / SINGLE_FILE, shards[0], dtype)
    file_names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for file_name, shard in zip(file_names, shards, strict=True):
        _write_shard(folder / file_name, shard, dtype)
    total_size = sum(leaf.size * dtype.itemsize for leaf in leaves.values())
    weight_map = {name: file_name for file_name, shard in zip(file_names, shards, strict=True) for name in shard}
    return _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _write_shard(path: Path, leaves: dict[str, jax.Array], dtype: np.dtype) -> None:
    """One safetensors file: the length of its header, the header, and the tensors one after the other.

    Written by hand, because the library's own function takes all tensors of a file at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, leaf in leaves.items():
        start, end = end, end + leaf.size * dtype.itemsize
        header[name] = {"dtype": STORED_NAMES[dtype.name], "shape": leaf.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers map the tensors behind it, so they are aligned
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, leaf in leaves.items():
            file.write(_on_host(name, leaf, dtype).reshape(-1).view(np.uint8).data)


def _on_host(name: str, leaf: jax.Array | np.ndarray, dtype: np.dtype) -> np.ndarray:
    whole = np.empty(leaf.shape, dtype)
    for index, piece in _pieces(leaf):
        # JAX keeps the host's copy of an array as long as the array: of this copy, until the next piece.
        cast = jnp.array(piece, dtype)
        if cast.dtype != leaf.dtype and (jnp.isinf(cast) & jnp.isfinite(piece)).any():
            raise ValueError(f"tensor {name!r} has values too large for {dtype.name}")
        whole[index] = np.asarray(cast)
    return whole


def _pieces(leaf: jax.Array | np.ndarray) -> list[tuple[Any, jax.Array | np.ndarray]]:
    """The parts of an array, and where they belong."""
    if isinstance(leaf, np.ndarray):
        return [(..., leaf)]
    if not leaf.is_fully_addressable:
        raise ValueError("the decoder has pieces on devices of other processes: save needs them on this host")
    return [(piece.index, piece.data) for piece in leaf.addressable_shards if piece.replica_id == 0]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    # A rename may reach the disk before the data that was written ahead of it.
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
