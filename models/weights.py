"""Fill a decoder with weights read one tensor at a time, whatever file they come from; its parameters by name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from models.config import DecoderConfig
from models.decoder import Decoder
from models.sharding import MeshRules


@runtime_checkable
class Sliceable(Protocol):
    """A stored tensor, of which pieces are read when they are asked for; NumPy arrays are some."""

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray:
        """One piece, with a slice for each axis."""


ReadTensor = Callable[[str, tuple[int, ...]], Sliceable | np.ndarray]


def fill(config: DecoderConfig, read: ReadTensor, dtype: DTypeLike, rules: MeshRules | None = None) -> Decoder:
    """A decoder whose parameter `name` is read(name, shape) cast to dtype; names are paths as "layers.3.query".

    Adapters are float32, as they are made.

    Random weights are never made: the tree is traced, and each leaf is replaced as it is read. On a mesh, each device
    gets its piece and no device the whole, and each piece is read once, however many devices hold it.
    """

    def load_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = parameter_name(path)
        values = read(name, leaf.shape)
        if rules is None:
            # jnp.array copies; device_put would share NumPy's buffer on the CPU, even with may_alias=False.
            return jnp.array(values[(slice(None),) * len(leaf.shape)], leaf.dtype)
        return _cut(values, leaf.shape, rules.parameter(name, config), leaf.dtype)

    return _with_rules(jax.tree_util.tree_map_with_path(load_leaf, parameter_shapes(config, dtype)), rules)


def _cut(
    values: Sliceable | np.ndarray, shape: tuple[int, ...], sharding: NamedSharding, dtype: DTypeLike
) -> jax.Array:
    # Slices are no keys before Python 3.12; their ends are.
    devices_of: dict[tuple[tuple[int | None, int | None], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        devices_of.setdefault(tuple((cut.start, cut.stop) for cut in index), []).append(device)
    pieces = []
    for ends, devices in devices_of.items():
        piece = values[tuple(slice(*end) for end in ends)]
        for device in devices:
            with jax.default_device(device):
                pieces.append(jnp.array(piece, dtype))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def shard(decoder: Decoder, rules: MeshRules | None) -> Decoder:
    """The same decoder with its parameters cut over a mesh; on the first device with None.

    Its `hidden`, `logits`, `prefill` and `decode` keep rows, heads and vocabulary cut, and `jaxmask.generate` and
    `train.grpo_step` find the sharding of its logits by themselves. Memory may be shared with the decoder given:
    whoever donates one (as training does) copies the other first, by `jax.tree.map(jnp.copy, decoder)`.
    """

    def move(path: tuple, leaf: jax.Array) -> jax.Array:
        place = jax.devices()[0] if rules is None else rules.parameter(parameter_name(path), decoder.config)
        return jax.device_put(leaf, place)

    return _with_rules(jax.tree_util.tree_map_with_path(move, decoder), rules)


def configure(decoder: Decoder, **changes: Any) -> Decoder:
    """The same parameters under other settings: `remat`, `compute_dtype`, `attention`, what keeps their shapes.

    Raises:
      ValueError: a value is not allowed, or the parameters would be others.
      TypeError: a name is no field of `DecoderConfig`.
    """
    config = dataclasses.replace(decoder.config, **changes)
    before, after = (named_parameters(parameter_shapes(each, jnp.float32)) for each in (decoder.config, config))
    if before != after:
        raise ValueError(
            f"{changes} would change the parameters of the decoder; only settings that leave them can change"
        )
    return from_named(config, named_parameters(decoder), decoder.rules)


def named_parameters(decoder: Decoder) -> dict[str, Any]:
    """Every array, or shape, of a decoder by its name, "layers.3.query" for one inside a layer."""
    return {parameter_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(decoder)}


def from_named(config: DecoderConfig, arrays: Mapping[str, jax.Array], rules: MeshRules | None = None) -> Decoder:
    """The decoder that holds the array of each parameter's name as it is; rules say where they already lie."""
    shapes = parameter_shapes(config, jnp.float32)
    return _with_rules(jax.tree_util.tree_map_with_path(lambda path, _: arrays[parameter_name(path)], shapes), rules)


def _with_rules(decoder: Decoder, rules: MeshRules | None) -> Decoder:
    # `decoder` is a tree of its own: the caller's modules stay as they are.
    for module in (decoder, *decoder.layers):
        module.rules = rules
    return decoder


def parameter_shapes(config: DecoderConfig, dtype: DTypeLike) -> Decoder:
    """The decoder with a shape in place of every array."""
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def parameter_names(config: DecoderConfig) -> list[str]:
    """Path of every parameter, "layers.3.query" for one inside a layer."""
    return list(named_parameters(parameter_shapes(config, np.float32)))


def parameter_name(path: tuple) -> str:
    """The name of the parameter at a path of the decoder's tree."""
    # The last key is the Param's own `value`.
    return jax.tree_util.keystr(path[:-1], simple=True, separator=".")
