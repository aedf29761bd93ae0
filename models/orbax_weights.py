"""A decoder as Orbax arrays and its configuration, read straight to the shards of whatever mesh it goes to.

    decoder.json  arrays/  arrays.files.json

The list of files covers decoder.json too. `models` does not import this module: Orbax takes a second to import.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from models.arrays import read_arrays, write_arrays
from models.config import DecoderConfig, LinearRopeScaling, Llama3RopeScaling, LoraConfig
from models.decoder import Decoder
from models.files import read_json
from models.records import from_values
from models.sharding import MeshRules
from models.weights import from_named, named_parameters, parameter_shapes

CONFIG_FILE, ARRAYS = "decoder.json", "arrays"
FORMAT = 1
ROPE_SCALINGS = {"llama3": Llama3RopeScaling, "linear": LinearRopeScaling}


def save_orbax(decoder: Decoder, folder: str | Path) -> None:
    """Writes a decoder, adapters included; on return it is complete.

    Args:
      decoder: on one device or on a mesh, each device writes what it holds.
      folder: made where there is none.

    Raises:
      ValueError: the folder holds a decoder already.
    """
    write_arrays(Path(folder) / ARRAYS, named_parameters(decoder), {CONFIG_FILE: config_to_json(decoder.config)})


def load_orbax(folder: str | Path, rules: MeshRules | None = None, dtype: DTypeLike | None = None) -> Decoder:
    """The decoder that `save_orbax` wrote.

    Args:
      folder: where it lies.
      rules: a mesh, of any shape, whose devices each read their own shards; None: the default device.
      dtype: of the weights, adapters stay float32; None: as they were stored.

    Raises:
      FileNotFoundError: there is no decoder.json.
      ValueError: a file is damaged, or decoder.json is of another decoder than the arrays; the reason is named.
    """
    folder = Path(folder)
    path = folder / CONFIG_FILE
    content = read_json(path)
    try:
        config = _config_from(content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    shapes = named_parameters(parameter_shapes(config, jnp.float32 if dtype is None else dtype))
    # Named, since Orbax would otherwise go back to the devices that wrote.
    here = SingleDeviceSharding(jax.local_devices()[0])
    wanted = {}
    for name, leaf in shapes.items():
        sharding = here if rules is None else rules.parameter(name, config)
        wanted[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    try:
        arrays = read_arrays(folder / ARRAYS, wanted, keep_dtypes=dtype is None)
    except ValueError as error:
        raise ValueError(f"{folder} is damaged or does not fit its {CONFIG_FILE}: {error}") from error
    return from_named(config, arrays, rules)


def config_to_json(config: DecoderConfig) -> str:
    """A configuration as JSON text; the stretch of rotary wavelengths carries its kind."""
    values = dataclasses.asdict(config)
    if config.rope_scaling is not None:
        kind = next(name for name, kind in ROPE_SCALINGS.items() if isinstance(config.rope_scaling, kind))
        values["rope_scaling"] = {"kind": kind, **values["rope_scaling"]}
    return json.dumps({"format": FORMAT, "config": values}, indent=2) + "\n"


def config_from_json(text: str) -> DecoderConfig:
    """The configuration that `config_to_json` wrote.

    Raises:
      ValueError: not JSON, a field is missing, unknown or of another type, or a value is out of range.
    """
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"a decoder must be a JSON object, got {content!r}.")
    return _config_from(content)


def _config_from(content: dict[str, Any]) -> DecoderConfig:
    if content.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {content.get('format')!r}.")
    values = content.get("config")
    if not isinstance(values, dict):
        raise ValueError("a decoder must have an object under 'config'.")
    values = dict(values)
    if isinstance(values.get("rope_scaling"), dict):
        scaling = dict(values["rope_scaling"])
        kind = scaling.pop("kind", None)
        if kind not in ROPE_SCALINGS:
            raise ValueError(f"rope_scaling's kind must be one of {', '.join(ROPE_SCALINGS)}, got {kind!r}.")
        values["rope_scaling"] = from_values(ROPE_SCALINGS[kind], scaling)
    if isinstance(values.get("lora"), dict):
        values["lora"] = from_values(LoraConfig, values["lora"])
    return from_values(DecoderConfig, values)
