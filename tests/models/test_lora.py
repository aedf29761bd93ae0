import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import models
from models import LoraConfig, MeshRules, lora, make_mesh
from models.config import PROJECTIONS
from models.huggingface import read_folder
from models.lora import _merged
from models.weights import from_named, named_parameters

DATA = Path(__file__).parents[1] / "data"
CONFIG = LoraConfig(3, 6.0, ("query", "down"))
LOGITS = jax.jit(lambda decoder, token_ids: decoder.logits(token_ids))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 6)), jnp.int32)


@pytest.fixture(scope="module")
def attached(decoder):
    return lora.attach(decoder, CONFIG, nnx.Rngs(1))


@pytest.fixture(scope="module")
def moved(attached):
    """Adapters as after training: B is no longer zero."""
    rng = np.random.default_rng(2)
    arrays = named_parameters(attached)
    new = {
        name: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)
        for name, leaf in arrays.items()
        if lora.is_adapter(name)
    }
    return from_named(attached.config, arrays | new)


def as_base(decoder, dtype):
    """The same decoder with weights rounded to a dtype; adapters stay as they are."""
    arrays = named_parameters(decoder)
    rounded = {name: leaf if lora.is_adapter(name) else leaf.astype(dtype) for name, leaf in arrays.items()}
    return from_named(decoder.config, rounded, decoder.rules)


def assert_same_decoder(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_new_adapters_change_nothing_and_share_the_base(decoder, attached):
    # Bit for bit but for what the compiler fuses.
    np.testing.assert_allclose(LOGITS(attached, TOKENS), LOGITS(decoder, TOKENS), atol=1e-5)
    arrays = named_parameters(attached)
    assert all(arrays[name] is leaf for name, leaf in named_parameters(decoder).items())
    new = sorted(name for name in arrays if lora.is_adapter(name))
    assert new == sorted(
        f"layers.{layer}.{target}_lora_{side}" for layer in (0, 1) for target in ("query", "down") for side in "ab"
    )
    assert_same_decoder(lora.detach(attached), decoder)


def test_a_is_uniform_as_peft_draws_it_and_b_is_zero():
    """PEFT: bound sqrt(6 / (1 + 5)) / sqrt(I), here 1 / 4, so the variance is 1 / 48."""
    shape = {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 24}
    config = models.DecoderConfig(
        vocab_size=5, rope_theta=1e4, rope_scaling=None, norm_eps=1e-6, tie_embeddings=True, **shape
    )
    decoder = models.Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    arrays = named_parameters(lora.attach(decoder, LoraConfig(500, 1.0, ("gate",)), nnx.Rngs(0)))
    down = np.asarray(arrays["layers.0.gate_lora_a"])
    assert down.dtype == np.float32
    assert 0.2499 < np.abs(down).max() <= 0.25
    # 8000 draws: the mean of x^2 has a standard deviation of 0.9 / 48 / sqrt(8000), here six of them.
    assert np.square(down).mean() == pytest.approx(1 / 48, abs=6 * 0.9 / 48 / 8000**0.5)
    up = arrays["layers.0.gate_lora_b"]
    assert (up.shape, up.dtype) == ((24, 500), jnp.float32)
    assert not up.any()


def test_merging_by_hand():
    """W = [[1, 2], [3, 4]], B A = [1; 2] [3, 4], scale 1/2."""
    weight, down, up = (jnp.asarray(x, jnp.float32) for x in ([[1, 2], [3, 4]], [[3, 4]], [[1], [2]]))
    np.testing.assert_array_equal(_merged(weight, down, up, 0.5), [[2.5, 4.0], [6.0, 8.0]])


def test_a_merged_bfloat16_weight_is_rounded_once(moved):
    base = as_base(moved, jnp.bfloat16)
    merged = lora.merge(base)
    name = "layers.1.down"
    weight, down, up = (np.float64(named_parameters(base)[name + part]) for part in ("", "_lora_a", "_lora_b"))
    exact = jnp.asarray((weight + 2.0 * up @ down).astype(np.float32)).astype(jnp.bfloat16)
    found = named_parameters(merged)[name]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(found), np.float32(exact))


def test_the_merged_policy_is_the_attached_one(moved, decoder):
    logits = LOGITS(moved, TOKENS)
    assert float(jnp.abs(logits - LOGITS(decoder, TOKENS)).max()) > 1
    merged = lora.merge(moved)
    assert merged.config == decoder.config
    np.testing.assert_allclose(LOGITS(merged, TOKENS), logits, atol=1e-5 * float(jnp.abs(logits).max()))


def test_float32_adapters_on_a_bfloat16_base_are_added_before_rounding(moved):
    layer = as_base(moved, jnp.bfloat16).layers[0]
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 16)), jnp.bfloat16)
    found = layer._linear(x, "query")
    assert found.dtype == jnp.bfloat16
    wide, weight = np.float64(x), np.float64(layer.query[...])
    plain = np.float64(jnp.asarray(wide @ weight.T + np.float64(layer.query_bias[...]), jnp.bfloat16))
    expected = plain + 2.0 * wide @ np.float64(layer.query_lora_a[...]).T @ np.float64(layer.query_lora_b[...]).T
    # Half an ulp of the sum, and of the product before it.
    np.testing.assert_allclose(np.float64(found), expected, rtol=2**-8, atol=2**-6)
    assert LOGITS(as_base(moved, jnp.bfloat16), TOKENS).dtype == jnp.float32


def test_adapters_on_a_mesh_lie_with_their_weights_and_compute_the_same(decoder, moved, tmp_path):
    rules = MeshRules(make_mesh(data=2, fsdp=2, tensor=2))
    lora.save(moved, tmp_path)
    loaded = lora.load(models.shard(decoder, rules), tmp_path)
    arrays = named_parameters(loaded)
    assert arrays["layers.0.query_lora_b"].sharding.spec == P("tensor", None)
    assert arrays["layers.0.down_lora_a"].sharding.spec == P(None, "tensor")
    np.testing.assert_allclose(LOGITS(loaded, TOKENS), LOGITS(moved, TOKENS), atol=1e-4)
    merged = lora.merge(loaded)
    for name, leaf in named_parameters(lora.merge(moved)).items():
        there = named_parameters(merged)[name]
        assert there.sharding == rules.parameter(name, merged.config)
        np.testing.assert_allclose(there, leaf, atol=1e-6)


def test_a_saved_folder_is_read_back_bit_for_bit(moved, decoder, tmp_path):
    lora.save(moved, tmp_path / "adapters", base_model_name="someone/model")
    assert_same_decoder(lora.load(decoder, tmp_path / "adapters"), moved)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, ["q_proj", "down_proj"])
    assert config["base_model_name_or_path"] == "someone/model"
    stored = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(stored) == 8
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    np.testing.assert_array_equal(stored[name], moved.layers[1].down_lora_a[...])


def test_what_peft_saved_computes_what_peft_computed():
    folder = DATA / "tiny_llama_peft"
    reference = np.load(folder / "reference.npz")
    decoder = lora.load(read_folder(DATA / "tiny_llama"), folder)
    assert decoder.config.lora == LoraConfig(3, 7.0, ("query", "down"))
    token_ids = jnp.asarray(reference["token_ids"], jnp.int32)
    np.testing.assert_allclose(LOGITS(decoder, token_ids), reference["logits"], atol=1e-4)


@pytest.mark.parametrize("target", PROJECTIONS)
def test_every_projection_has_its_name(target, decoder):
    name = lora.peft_name(f"layers.7.{target}_lora_b", decoder.config)
    letter = {"query": "q", "key": "k", "value": "v", "output": "o"}.get(target)
    module = f"self_attn.{letter}_proj" if letter else f"mlp.{target}_proj"
    assert name == f"base_model.model.model.layers.7.{module}.lora_B.weight"


def _without(name):
    def change(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path)

    return change


def _with(name, shape):
    def change(folder):
        path = folder / "adapter_model.safetensors"
        save_file(load_file(path) | {name: np.zeros(shape, np.float32)}, path)

    return change


def _torn(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


QUERY_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
KEY_A = QUERY_A.replace("q_proj", "k_proj")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(QUERY_A), rf"adapter_model.safetensors: tensor '{QUERY_A}' is missing"),
        (_with(KEY_A, (3, 48)), rf"safetensors: tensor '{KEY_A}' belongs to no adapter of query, down"),
        (_with(QUERY_A, (3, 47)), rf"tensor '{QUERY_A}' must have shape \(3, 48\), it has \(3, 47\)"),
        (_torn, "adapter_model.safetensors is not a whole safetensors file"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "adapter_config.json: peft_type=None"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(change, message, tmp_path):
    folder = shutil.copytree(DATA / "tiny_llama_peft", tmp_path / "adapters")
    change(folder)
    with pytest.raises(ValueError, match=message) as caught:
        lora.load(read_folder(DATA / "tiny_llama"), folder)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(decoder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        lora.load(decoder, tmp_path)
    shutil.copy(DATA / "tiny_llama_peft" / "adapter_config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model\.safetensors"):
        lora.load(decoder, tmp_path)


def test_adapters_are_neither_stacked_nor_invented(decoder, attached, tmp_path):
    with pytest.raises(ValueError, match=r"has adapters already: LoraConfig\(rank=3"):
        lora.attach(attached, CONFIG, nnx.Rngs(0))
    with pytest.raises(ValueError, match="has adapters already"):
        lora.load(attached, tmp_path)
    for function in (lora.merge, lora.detach, lambda decoder: lora.save(decoder, tmp_path / "none")):
        with pytest.raises(ValueError, match="has no adapters"):
            function(decoder)
    assert not (tmp_path / "none").exists()
