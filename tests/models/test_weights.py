import jax
import jax.numpy as jnp
import numpy as np

from models.weights import fill, parameter_names, parameter_shapes


def test_each_parameter_is_read_once_by_name_and_shape(decoder):
    seen = {}

    def read(name, shape):
        seen[name] = shape
        return np.full(shape, len(seen), np.float64)

    filled = fill(decoder.config, read, jnp.float32)
    assert list(seen) == parameter_names(decoder.config)
    assert seen["layers.1.down"] == (16, 24)
    assert (filled.layers[1].down[...] == list(seen).index("layers.1.down") + 1).all()
    assert jax.tree.structure(filled) == jax.tree.structure(decoder)
    assert {leaf.dtype for leaf in jax.tree.leaves(filled)} == {jnp.dtype("float32")}


def test_the_decoder_shares_no_memory_with_the_arrays_read_and_can_be_donated(decoder):
    buffers = {}

    def read(name, shape):
        return buffers.setdefault(name, np.ones(shape, np.float32))

    filled = fill(decoder.config, read, jnp.float32)
    for buffer in buffers.values():
        buffer[...] = 2.0
    assert all((leaf == 1.0).all() for leaf in jax.tree.leaves(filled))
    # A buffer that cannot be donated warns, and warnings are errors here.
    doubled = jax.jit(lambda decoder: jax.tree.map(lambda leaf: 2 * leaf, decoder), donate_argnums=0)(filled)
    assert all((leaf == 2.0).all() for leaf in jax.tree.leaves(doubled))


def test_shapes_hold_no_arrays(decoder):
    shapes = parameter_shapes(decoder.config, jnp.bfloat16)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert shapes.embedding.shape == (31, 16)
