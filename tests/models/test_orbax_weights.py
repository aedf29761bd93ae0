import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models import LoraConfig, MeshRules, lora, make_mesh
from models.config import LinearRopeScaling, Llama3RopeScaling
from models.huggingface import read_config
from models.orbax_weights import config_from_json, config_to_json, load_orbax, save_orbax
from models.weights import named_parameters


@pytest.fixture(scope="module")
def adapted(decoder):
    return lora.attach(decoder, LoraConfig(2, 4.0, ("value", "up")), nnx.Rngs(0))


@pytest.fixture(scope="module")
def saved(adapted, tmp_path_factory):
    """Written from a mesh of 8 devices."""
    folder = tmp_path_factory.mktemp("orbax") / "decoder"
    save_orbax(models.shard(adapted, MeshRules(make_mesh(fsdp=2, tensor=4))), folder)
    return folder


def assert_same(found, expected):
    for (name, one), other in zip(named_parameters(found).items(), named_parameters(expected).values(), strict=True):
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other)


def test_load_finds_it_too(saved, adapted):
    found, tokenizer = models.load(saved)
    assert_same(found, adapted)
    assert tokenizer is None


def test_a_decoder_is_read_back_bit_for_bit_on_one_device(saved, adapted):
    found = load_orbax(saved)
    assert jax.tree.structure(found) == jax.tree.structure(adapted)
    assert_same(found, adapted)
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("sizes", [{"data": 8}, {"fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_another_mesh_than_it_was_saved_from(saved, adapted, sizes):
    rules = MeshRules(make_mesh(**sizes))
    found = load_orbax(saved, rules)
    assert found.rules == found.layers[0].rules == rules
    assert_same(found, adapted)
    for name, leaf in named_parameters(found).items():
        assert leaf.sharding == rules.parameter(name, adapted.config)


def test_weights_in_another_dtype_keep_float32_adapters(saved, adapted, tmp_path):
    found = load_orbax(saved, dtype=jnp.bfloat16)
    for name, leaf in named_parameters(adapted).items():
        expected = leaf if lora.is_adapter(name) else leaf.astype(jnp.bfloat16)
        there = named_parameters(found)[name]
        assert there.dtype == expected.dtype
        np.testing.assert_array_equal(there, expected)
    save_orbax(found, tmp_path / "half")
    assert_same(load_orbax(tmp_path / "half"), found)


def test_a_decoder_is_never_written_over(saved, adapted):
    before = (saved / "decoder.json").read_text()
    with pytest.raises(ValueError, match="exists already"):
        save_orbax(lora.detach(adapted), saved)
    assert (saved / "decoder.json").read_text() == before


def _rename_field(folder):
    path = folder / "decoder.json"
    path.write_text(path.read_text().replace('"width"', '"breadth"'))


def _another_theta(folder):
    path = folder / "decoder.json"
    path.write_text(path.read_text().replace("10000.0", "20000.0"))


def _another_format(folder):
    path = folder / "decoder.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def _flip_a_bit(folder):
    file = max((folder / "arrays").rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_rename_field, r"decoder\.json is damaged: unknown fields \['breadth'\] of DecoderConfig"),
        (_another_format, r"decoder\.json is damaged: format must be 1, got 2"),
        (lambda folder: (folder / "decoder.json").write_text("{"), r"decoder\.json is not valid JSON"),
        (_another_theta, r"does not fit its decoder\.json: file \.\./decoder\.json does not have its checksum"),
        (_flip_a_bit, "does not have its checksum"),
        (lambda folder: shutil.rmtree(folder / "arrays"), "file .* is missing"),
        (lambda folder: (folder / "arrays.files.json").unlink(), r"arrays\.files\.json"),
    ],
)
def test_what_is_damaged_is_refused_in_one_line(saved, tmp_path, damage, message):
    folder = shutil.copytree(saved, tmp_path / "decoder")
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_orbax(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 30}, r"array embedding has shape \(31, 16\), not \(30, 16\)"),
        ({"num_layers": 3}, r"it lacks an array layers\.2\.attention_norm"),
        ({"lora": None}, r"it holds an array layers\.0\.up_lora_a"),
    ],
)
def test_arrays_of_another_configuration_are_refused(saved, adapted, tmp_path, change, message):
    folder = shutil.copytree(saved, tmp_path / "decoder")
    (folder / "decoder.json").write_text(config_to_json(dataclasses.replace(adapted.config, **change)))
    listed = json.loads((folder / "arrays.files.json").read_text())
    del listed["../decoder.json"]
    (folder / "arrays.files.json").write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=message):
        load_orbax(folder)


def test_no_decoder_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no decoder\.json"):
        load_orbax(tmp_path)


def test_configurations_round_trip(tiny_folder, decoder):
    config = read_config(tiny_folder)
    assert config_from_json(config_to_json(config)) == config
    for scaling in (Llama3RopeScaling(8.0, 1.0, 4.0, 64), LinearRopeScaling(2.0), None):
        changed = dataclasses.replace(config, rope_scaling=scaling, lora=LoraConfig(2, 3.0, ("up",)))
        assert config_from_json(config_to_json(changed)) == changed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_layers": 2', '"num_layers": "2"', "num_layers must be of type int, got '2'"),
        ('"num_layers": 2', '"num_layers": 0', "num_layers=0 is not supported"),
        ('"lora": null', '"lora": {"rank": 2}', "LoraConfig does not fit: .*alpha"),
        ('"rope_scaling": null', '"rope_scaling": {"kind": "yarn"}', "kind must be one of llama3, linear, got 'yarn'"),
    ],
)
def test_a_configuration_is_checked_when_read(decoder, old, new, message):
    text = config_to_json(decoder.config)
    assert old in text
    with pytest.raises(ValueError, match=message):
        config_from_json(text.replace(old, new))


def test_models_do_not_import_orbax():
    code = "import sys, models, models.lora; assert 'orbax.checkpoint' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
