import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_models import MODEL, Programs
from tiny_weights import decoder, with_number

import models
from models.orbax_weights import save_orbax
from models.sharding import MeshRules, make_mesh
from serve.weight_files import Places, on_the_host

OLD, NEW = decoder(0), decoder(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """New weights in both kinds of folders."""
    folder = tmp_path_factory.mktemp("weights")
    models.save(NEW, folder / "hub")
    save_orbax(NEW, folder / "orbax")
    return folder


def leaves_of(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


def assert_same(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@jax.jit
def use(model):
    return jax.tree.map(lambda leaf: leaf.sum(), model)


@pytest.mark.parametrize("kind", ["hub", "orbax"])
@pytest.mark.parametrize("place", ["anywhere", "a device", "a mesh"])
def test_new_weights_lie_where_the_old_ones_do_and_compile_nothing(kind, place, folders):
    old = OLD
    if place == "a device":
        old = jax.device_put(OLD, jax.devices()[1])
    if place == "a mesh":
        old = models.shard(OLD, MeshRules(make_mesh(tensor=2, fsdp=2)))
    use(old)
    places = Places(old)
    leaves = places.read(str(folders / kind))
    with Programs() as programs:
        new = places.put(leaves)
        used = use(new)
    assert programs.count == 0
    assert_same(new, NEW)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    assert_same(used, use(new))
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert (one.sharding, one.committed) == (other.sharding, other.committed)


def test_weights_are_rounded_to_the_type_of_the_old_ones(folders):
    old = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), OLD)
    places = Places(old)
    for kind in ("hub", "orbax"):
        new = places.put(places.read(str(folders / kind)))
        assert_same(new, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), NEW))


def test_a_number_that_the_type_cannot_hold_is_refused(tmp_path):
    models.save(with_number(NEW, 3.4e38), tmp_path / "large")
    old = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), OLD)
    with pytest.raises(ValueError, match=r"layers.0.down' has a number that is not finite"):
        Places(old).read(str(tmp_path / "large"))
    Places(OLD).read(str(tmp_path / "large"))


def test_how_a_decoder_computes_may_differ(folders):
    places = Places(models.configure(OLD, attention="xla", compute_dtype="bfloat16"))
    new = places.put(places.read(str(folders / "hub")))
    assert new.config.compute_dtype == "bfloat16"


def test_weights_move_to_the_host_and_back(folders):
    leaves = on_the_host(NEW)
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
    assert_same(Places(OLD).put(leaves), NEW)


def test_a_model_without_values_has_its_shapes():
    shapes = jax.tree.leaves(Places(OLD).without_values())
    assert [(leaf.shape, leaf.dtype) for leaf in shapes] == [(leaf.shape, leaf.dtype) for leaf in leaves_of(OLD)]


def test_weights_are_read_for_decoders_alone(folders):
    with pytest.raises(ValueError, match=r"a models\.Decoder"):
        Places(MODEL).read(str(folders / "hub"))
