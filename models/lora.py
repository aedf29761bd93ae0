"""Adapters beside a decoder's projections: attach, merge or drop them, and exchange them with PEFT.

    adapter_config.json  adapter_model.safetensors

Not here: dropout, DoRA, adapters of the embedding, ranks that differ between projections.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from models.block import new_adapter
from models.config import DecoderConfig, LoraConfig
from models.decoder import Decoder
from models.files import read_json, write_whole
from models.huggingface import StoredTensor, hub_name, open_safetensors
from models.layers import PRECISION
from models.peft_config import from_peft, to_peft
from models.weights import from_named, named_parameters, parameter_names

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
SIDES = {"_lora_a": "lora_A", "_lora_b": "lora_B"}


def is_adapter(name: str) -> bool:
    """Whether a parameter, named as "layers.3.query_lora_a", belongs to an adapter."""
    return name.endswith(tuple(SIDES))


def attach(decoder: Decoder, lora: LoraConfig, rngs: nnx.Rngs) -> Decoder:
    """The decoder with new adapters, which change nothing yet; it shares all other arrays with the one given.

    Training donates the arrays of its state: to keep the base beside it, attach to a copy of it.

    Args:
      decoder: its weights may have any float dtype, the adapters are float32.
      lora: rank, scale and which projections.
      rngs: A is drawn from its `params`.

    Raises:
      ValueError: it has adapters already.
    """
    _require_none(decoder)
    arrays = named_parameters(decoder)
    new: dict[str, jax.Array] = {}
    for layer in range(decoder.config.num_layers):
        for target in lora.targets:
            name = f"layers.{layer}.{target}"
            down, up = new_adapter(rngs, arrays[name].shape, lora.rank)
            new |= {f"{name}_lora_a": down[...], f"{name}_lora_b": up[...]}
    return _with_adapters(decoder, lora, new)


def merge(decoder: Decoder) -> Decoder:
    """The same policy without adapters: W + alpha / r B A, in float32, rounded once to the dtype of W.

    Weights without an adapter are shared with the decoder given.

    Raises:
      ValueError: it has none.
    """
    lora = _lora_of(decoder)
    arrays = named_parameters(decoder)
    for layer in range(decoder.config.num_layers):
        for target in lora.targets:
            name = f"layers.{layer}.{target}"
            merged = _merged(arrays[name], arrays[f"{name}_lora_a"], arrays[f"{name}_lora_b"], lora.scale)
            arrays[name] = merged if decoder.rules is None else _place(name, merged, decoder)
    return from_named(dataclasses.replace(decoder.config, lora=None), arrays, decoder.rules)


def detach(decoder: Decoder) -> Decoder:
    """The base alone, its arrays shared with the decoder given.

    Raises:
      ValueError: it has no adapters.
    """
    _lora_of(decoder)
    return from_named(dataclasses.replace(decoder.config, lora=None), named_parameters(decoder), decoder.rules)


def save(decoder: Decoder, folder: str | Path, base_model_name: str | None = None) -> None:
    """Writes the adapters as a folder that PEFT's `PeftModel.from_pretrained` reads; files there are replaced.

    Args:
      decoder: with adapters.
      folder: made where there is none.
      base_model_name: hub name or path of the base, for PEFT's record.

    Raises:
      ValueError: it has no adapters.
    """
    folder = Path(folder)
    config = to_peft(_lora_of(decoder), base_model_name)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = jax.device_get({name: leaf for name, leaf in named_parameters(decoder).items() if is_adapter(name)})
    tensors = {peft_name(name, decoder.config): np.ascontiguousarray(values) for name, values in arrays.items()}
    part = folder / f"{WEIGHTS_FILE}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / WEIGHTS_FILE)
    write_whole(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def load(decoder: Decoder, folder: str | Path) -> Decoder:
    """The decoder with the adapters of a PEFT folder, as float32; it shares all other arrays with the one given.

    Args:
      decoder: the base that the adapters were trained on, without adapters of its own.
      folder: as `save` or PEFT's `save_pretrained` writes it.

    Raises:
      FileNotFoundError: a file is not there.
      ValueError: a file is damaged, an option is not supported, or a tensor is missing, misshapen or unknown.
    """
    _require_none(decoder)
    folder = Path(folder)
    path = folder / CONFIG_FILE
    content = read_json(path)
    try:
        lora = from_peft(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _with_adapters(decoder, lora, _read(folder / WEIGHTS_FILE, decoder, lora))


def peft_name(name: str, config: DecoderConfig) -> str:
    """PEFT's name of an adapter's parameter: "layers.3.query_lora_a" is
    "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight".
    """
    suffix = next(suffix for suffix in SIDES if name.endswith(suffix))
    weight = hub_name(name.removesuffix(suffix), config)
    return f"base_model.model.{weight.removesuffix('weight')}{SIDES[suffix]}.weight"


def _read(path: Path, decoder: Decoder, lora: LoraConfig) -> dict[str, jax.Array]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    config = dataclasses.replace(decoder.config, lora=lora)
    names = {peft_name(name, config): name for name in parameter_names(config) if is_adapter(name)}
    weights = named_parameters(decoder)
    with open_safetensors(path) as handle:
        stored = set(handle.keys())
        for name in sorted(names.keys() - stored):
            raise ValueError(f"{path}: tensor {name!r} is missing")
        for name in sorted(stored - names.keys()):
            raise ValueError(f"{path}: tensor {name!r} belongs to no adapter of {', '.join(lora.targets)}")
        return {
            ours: _float32(StoredTensor(path, name, handle), _shape(ours, weights, lora))
            for name, ours in names.items()
        }


def _float32(tensor: StoredTensor, shape: tuple[int, int]) -> jax.Array:
    # A copy: device_put would share NumPy's buffer on the CPU, and training donates it.
    return jnp.array(tensor.checked(shape)[:, :], jnp.float32)


def _shape(name: str, weights: dict[str, jax.Array], lora: LoraConfig) -> tuple[int, int]:
    num_outputs, num_inputs = weights[name.rpartition("_lora_")[0]].shape
    return (lora.rank, num_inputs) if name.endswith("_lora_a") else (num_outputs, lora.rank)


def _with_adapters(decoder: Decoder, lora: LoraConfig, new: dict[str, jax.Array]) -> Decoder:
    config = dataclasses.replace(decoder.config, lora=lora)
    if decoder.rules is not None:
        new = {name: _place(name, values, decoder) for name, values in new.items()}
    return from_named(config, named_parameters(decoder) | new, decoder.rules)


def _place(name: str, values: jax.Array, decoder: Decoder) -> jax.Array:
    assert decoder.rules is not None
    return jax.device_put(values, decoder.rules.parameter(name, decoder.config))


@jax.jit
def _merged(weight: jax.Array, down: jax.Array, up: jax.Array, scale: Any) -> jax.Array:
    added = jnp.matmul(up.astype(jnp.float32), down.astype(jnp.float32), precision=PRECISION)
    return (weight.astype(jnp.float32) + jnp.float32(scale) * added).astype(weight.dtype)


def _lora_of(decoder: Decoder) -> LoraConfig:
    if decoder.config.lora is None:
        raise ValueError("the decoder has no adapters; lora.attach gives it some")
    return decoder.config.lora


def _require_none(decoder: Decoder) -> None:
    if decoder.config.lora is not None:
        raise ValueError(f"the decoder has adapters already: {decoder.config.lora}; merge or detach them first")
