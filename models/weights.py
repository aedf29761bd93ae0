"""Fill a decoder with weights read one tensor at a time, whatever file they come from."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.config import DecoderConfig
from models.decoder import Decoder

ReadTensor = Callable[[str, tuple[int, ...]], np.ndarray]


def fill(config: DecoderConfig, read: ReadTensor, dtype: DTypeLike) -> Decoder:
    """A decoder whose parameter `name` is read(name, shape) cast to dtype; names are paths as "layers.3.query".

    Random weights are never made: the tree is traced, and each leaf is replaced as it is read.
    """

    def load_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        # jnp.array copies; device_put would share NumPy's buffer on the CPU, even with may_alias=False.
        return jnp.array(read(_name(path), leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(load_leaf, parameter_shapes(config, dtype))


def parameter_shapes(config: DecoderConfig, dtype: DTypeLike) -> Decoder:
    """The decoder with a shape in place of every array."""
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def parameter_names(config: DecoderConfig) -> list[str]:
    """Path of every parameter, "layers.3.query" for one inside a layer."""
    leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config, np.float32))
    return [_name(path) for path, _ in leaves]


def _name(path: tuple) -> str:
    # The last key is the Param's own `value`.
    return jax.tree_util.keystr(path[:-1], simple=True, separator=".")
