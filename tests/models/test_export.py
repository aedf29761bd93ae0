import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import models
from models import export
from models.export_config import to_hub
from models.hub_config import from_hub
from models.huggingface import read_config, read_folder
from models.sharding import MeshRules, make_mesh
from models.tokenizer import Tokenizer
from models.weights import fill, named_parameters, parameter_shapes

GEMMA3 = Path(__file__).parents[1] / "data" / "tiny_gemma3"


@pytest.fixture(scope="session")
def decoder():
    return read_folder(GEMMA3)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "new" / "model"


def stored_in(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_tensors(found, expected, dtype):
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor, expected[name].astype(dtype))


def test_every_family_comes_back_bit_for_bit(stored_folder, folder):
    models.save(read_folder(stored_folder), folder)
    assert_same_tensors(stored_in(folder), stored_in(stored_folder), np.float32)
    assert read_config(folder) == read_config(stored_folder)


def test_every_family_comes_back_bit_for_bit_in_the_stored_dtype(stored_folder, folder):
    models.save(read_folder(stored_folder, jnp.bfloat16), folder)
    models.save(read_folder(stored_folder), folder.with_name("cast"), dtype=jnp.bfloat16)
    for one in (folder, folder.with_name("cast")):
        assert_same_tensors(stored_in(one), stored_in(stored_folder), jnp.bfloat16)
        assert json.loads((one / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_old_fields_say_what_the_new_ones_say(stored_folder):
    config = read_config(stored_folder)
    hub = to_hub(config)
    assert hub["rope_parameters"]
    old = {name: value for name, value in hub.items() if name not in ("rope_parameters", "dtype")}
    assert from_hub(old) == from_hub(hub) == config


def test_large_weights_are_cut_into_files_with_an_index(decoder, folder):
    models.save(decoder, folder, max_shard_bytes=60_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    # 98,304 bytes of the embedding alone, then 60,000 and less at a time.
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(decoder))
    sizes = [sum(tensor.nbytes for tensor in load_file(folder / name).values()) for name in files]
    assert sizes[0] == 98_304
    assert max(sizes[1:]) <= 60_000
    assert_same_trees(read_folder(folder), decoder)


def assert_same_trees(one, other):
    for leaf, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_a_decoder_cut_over_a_mesh_gives_the_same_bytes(decoder, folder):
    rules = MeshRules(make_mesh(data=2, fsdp=2, tensor=2))
    models.save(models.shard(decoder, rules), folder)
    models.save(decoder, folder.with_name("whole"))
    one, other = (path / "model.safetensors" for path in (folder, folder.with_name("whole")))
    assert one.read_bytes() == other.read_bytes()


def test_no_copy_of_the_weights_stays_on_the_host(decoder, folder):
    # JAX would keep the host's copy of a cut array with the array.
    sharded = models.shard(decoder, MeshRules(make_mesh(tensor=2)))
    models.save(sharded, folder)
    assert all(leaf._npy_value is None for leaf in jax.tree.leaves(sharded))


def test_not_a_number_is_a_number_too(decoder, folder):
    broken = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan), decoder)
    models.save(broken, folder)
    assert_same_trees(read_folder(folder), broken)


def test_the_tokenizer_is_saved_and_its_ends_of_reply_are_named(decoder, folder, backend):
    models.save(decoder, folder, Tokenizer(backend, bos_token_id=1, eos_token_ids=[2, 0], pad_token_id=0))
    expected = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    for name in ("generation_config.json", "config.json"):
        assert json.loads((folder / name).read_text()).items() >= expected.items()
    tokenizer = models.load(folder)[1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2, 0), 0)
    assert tokenizer.encode("he 12") == Tokenizer(backend).encode("he 12")


def test_values_too_large_for_the_stored_dtype_are_refused(decoder, folder):
    large = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(1e6), decoder)
    with pytest.raises(ValueError, match=r"tensor 'model.embed_tokens.weight' has values too large for float16"):
        models.save(large, folder, dtype=jnp.float16)
    assert not folder.exists()


def test_a_link_to_an_empty_folder_is_filled(decoder, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    models.save(decoder, tmp_path / "link")
    assert (tmp_path / "real" / "config.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_a_gemma_whose_scale_no_file_can_hold_is_refused(decoder, folder):
    with pytest.raises(ValueError, match=r"attention_scale=0\.3 is not supported"):
        models.save(models.configure(decoder, attention_scale=0.3), folder)


def test_without_a_tokenizer_no_end_of_reply_is_named(decoder, folder):
    models.save(decoder, folder)
    expected = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    assert json.loads((folder / "generation_config.json").read_text()) == expected


def test_a_crash_leaves_nothing(decoder, folder, monkeypatch):
    def write(path, leaves, dtype):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(export, "_write_shard", write)
    with pytest.raises(OSError, match="no space"):
        models.save(decoder, folder)
    assert list(folder.parent.iterdir()) == []


def test_an_empty_folder_is_filled_and_a_full_one_is_left_alone(decoder, folder):
    folder.mkdir(parents=True)
    models.save(decoder, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match=f"{folder} must be new or an empty folder"):
        models.save(decoder, folder)
    with pytest.raises(FileExistsError, match=r"config\.json must be new or an empty folder"):
        models.save(decoder, folder / "config.json")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_adapters_are_refused(decoder, folder):
    config = dataclasses.replace(decoder.config, lora=models.LoraConfig(rank=2, alpha=4.0))
    with pytest.raises(ValueError, match=r"lora=.*merge the adapters first"):
        models.save(parameter_shapes(config, jnp.float32), folder)
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": jnp.int8}, "dtype='int8' is not supported, allowed: one of ('float32', 'bfloat16', 'float16')"),
        ({"max_shard_bytes": 0}, "max_shard_bytes=0 is not supported, allowed: an integer >= 1"),
    ],
)
def test_wrong_arguments_are_refused(decoder, folder, arguments, message):
    with pytest.raises(ValueError) as raised:
        models.save(decoder, folder, **arguments)
    assert message in str(raised.value)
    assert not folder.exists()


PLAIN = models.DecoderConfig(
    vocab_size=32,
    num_layers=4,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=24,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=True,
)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"sliding_window": 8}, "mistral"),
        ({"attention_bias": True, "sliding_window": 8, "full_layers": (0, 1)}, "qwen2"),
        ({"qk_norm": True, "sliding_window": 8, "full_layers": (0,)}, "qwen3"),
        ({"unrotated_layers": (3,)}, "smollm3"),
        ({"unrotated_layers": (1,), "sliding_window": 8, "full_layers": (0, 2, 3)}, "smollm3"),
    ],
)
def test_the_family_that_computes_the_same_is_found(changes, family):
    config = dataclasses.replace(PLAIN, **changes)
    hub = to_hub(config)
    assert hub["model_type"] == family
    assert from_hub(json.loads(json.dumps(hub))) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "qk_norm": True},
        {"sliding_window": 8, "full_layers": (0,)},
        {"norm_plus_one": True},
        {"logit_softcap": 30.0},
        {"activation": "gelu_tanh"},
        {"qk_norm": True, "unrotated_layers": (0,)},
    ],
)
def test_a_mixture_that_no_family_computes_is_refused(changes):
    with pytest.raises(ValueError, match="no hub family has this mixture"):
        to_hub(dataclasses.replace(PLAIN, **changes))


def test_names_of_parameters_go_with_their_arrays(decoder):
    names = named_parameters(decoder)
    assert names["layers.2.key_norm"] is decoder.layers[2].key_norm[...]
    same = fill(decoder.config, lambda name, shape: np.asarray(names[name]), jnp.float32)
    assert_same_trees(same, decoder)
