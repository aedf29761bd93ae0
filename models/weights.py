"""Fill a decoder with weights read one tensor at a time, whatever file they come from; its parameters by name."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.config import DecoderConfig
from models.decoder import Decoder
from models.sharding import MeshRules

ReadTensor = Callable[[str, tuple[int, ...]], np.ndarray]


def fill(config: DecoderConfig, read: ReadTensor, dtype: DTypeLike, rules: MeshRules | None = None) -> Decoder:
    """A decoder whose parameter `name` is read(name, shape) cast to dtype; names are paths as "layers.3.query".

    Adapters are float32, as they are made.

    Random weights are never made: the tree is traced, and each leaf is replaced as it is read. On a mesh, each device
    gets its piece and no device the whole.
    """

    def load_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = read(parameter_name(path), leaf.shape)
        # jnp.array copies; device_put would share NumPy's buffer on the CPU, even with may_alias=False.
        if rules is None:
            return jnp.array(values, leaf.dtype)
        sharding = rules.parameter(parameter_name(path), config)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda piece: np.array(values[piece], leaf.dtype))

    return _with_rules(jax.tree_util.tree_map_with_path(load_leaf, parameter_shapes(config, dtype)), rules)


def shard(decoder: Decoder, rules: MeshRules | None) -> Decoder:
    """The same decoder with its parameters cut over a mesh; on the first device with None.

    Its `hidden`, `logits`, `prefill` and `decode` keep rows, heads and vocabulary cut, and `jaxmask.generate` and
    `train.grpo_step` find the sharding of its logits by themselves.
    """

    def move(path: tuple, leaf: jax.Array) -> jax.Array:
        place = jax.devices()[0] if rules is None else rules.parameter(parameter_name(path), decoder.config)
        return jax.device_put(leaf, place)

    return _with_rules(jax.tree_util.tree_map_with_path(move, decoder), rules)


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
