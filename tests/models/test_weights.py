import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sharding import MeshRules, make_mesh
from models.weights import configure, fill, parameter_names, parameter_shapes


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


class Spy:
    """Remembers which pieces of an array were asked for."""

    def __init__(self, values):
        self.values, self.asked = values, []

    def __getitem__(self, index):
        self.asked.append(index)
        return self.values[index]


def test_a_mesh_reads_each_piece_once_and_never_the_whole(decoder):
    # The decoder's vocabulary is odd: its rows are not cut.
    noise, spies = np.random.default_rng(0), {}

    def read(name, shape):
        return spies.setdefault(name, Spy(noise.standard_normal(shape).astype(np.float32)))

    rules = MeshRules(make_mesh(data=2, fsdp=2, tensor=2))
    filled = fill(decoder.config, read, jnp.bfloat16, rules)
    assert all(module.rules is rules for module in (filled, *filled.layers))
    for (name, spy), leaf in zip(spies.items(), jax.tree.leaves(filled), strict=True):
        np.testing.assert_array_equal(leaf, spy.values.astype(jnp.bfloat16))
        assert leaf.sharding == rules.parameter(name, decoder.config)
        sizes = [spy.values[index].size for index in spy.asked]
        assert sum(sizes) == spy.values.size
        assert len(set(sizes)) == 1
    num_pieces = {name: len(spy.asked) for name, spy in spies.items()}
    assert num_pieces["layers.0.query"] == num_pieces["layers.1.down"] == 4
    assert num_pieces["embedding"] == num_pieces["layers.0.key_bias"] == 2
    assert num_pieces["final_norm"] == 1


def test_pieces_on_a_mesh_share_no_memory_with_the_arrays_read(decoder):
    buffers = {}

    def read(name, shape):
        return buffers.setdefault(name, np.ones(shape, np.float32))

    filled = fill(decoder.config, read, jnp.float32, MeshRules(make_mesh(tensor=2)))
    for buffer in buffers.values():
        buffer[...] = 2.0
    assert all((np.asarray(leaf) == 1.0).all() for leaf in jax.tree.leaves(filled))


def test_configure_keeps_every_array_and_changes_settings_alone(decoder):
    changed = configure(decoder, remat=True, compute_dtype="bfloat16")
    assert (changed.config.remat, changed.config.compute_dtype) == (True, "bfloat16")
    assert (decoder.config.remat, decoder.layers[0].config.remat) == (False, False)
    assert changed.layers[1].config is changed.config
    for one, other in zip(jax.tree.leaves(changed), jax.tree.leaves(decoder), strict=True):
        assert one is other


def test_configure_refuses_what_would_be_another_decoder(decoder):
    with pytest.raises(ValueError, match=r"'num_layers': 3.* would change the parameters"):
        configure(decoder, num_layers=3)
    with pytest.raises(ValueError, match="would change the parameters"):
        configure(decoder, tie_embeddings=True)
    with pytest.raises(TypeError, match="colour"):
        configure(decoder, colour="red")
