import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from models.huggingface import StoredTensor, hub_name, read_folder
from models.sharding import MeshRules, make_mesh
from models.weights import parameter_names

# transformers' float32 matrix products against ours, over 3 layers.
REFERENCE_TOLERANCE = 1e-4
# Of the largest state; Gemma's are up to 30.
HIDDEN_TOLERANCE = 1e-5


@pytest.fixture
def llama_folder(folder_copy):
    return folder_copy("tiny_llama")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder, error=ValueError):
    with pytest.raises(error) as raised:
        read_folder(folder)
    message = str(raised.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


def test_logits_equal_the_reference(stored_folder):
    decoder, reference = read_folder(stored_folder), np.load(stored_folder / "reference.npz")
    logits = jax.jit(lambda decoder, *inputs: decoder.logits(*inputs))(
        decoder, reference["input_ids"], reference["lengths"]
    )
    is_token = np.arange(40)[None] < reference["lengths"][:, None]
    np.testing.assert_allclose(logits[is_token], reference["logits"][is_token], rtol=0, atol=REFERENCE_TOLERANCE)


def test_greedy_continuation_equals_the_reference(tiny_folder):
    decoder, reference = read_folder(tiny_folder), np.load(tiny_folder / "reference.npz")
    prompt_ids, lengths = reference["input_ids"], reference["lengths"]
    last_ids = prompt_ids[np.arange(3), lengths - 1]

    drawn = continue_greedily(decoder, prompt_ids, lengths, last_ids)
    np.testing.assert_array_equal(drawn, reference["gen_tokens"])


@jax.jit
def continue_greedily(decoder, prompt_ids, lengths, last_ids):
    def step(state, _):
        logits, cache = decoder.decode(*state)
        token_ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token_ids, cache), token_ids

    cache = decoder.prefill(prompt_ids, lengths - 1, capacity=64)
    return jax.lax.scan(step, (last_ids, cache), length=24)[1].T


def test_the_last_hidden_states_equal_the_reference(tiny_folder):
    decoder, reference = read_folder(tiny_folder), np.load(tiny_folder / "reference.npz")
    hidden = jax.jit(lambda decoder, token_ids: decoder.hidden(token_ids))(decoder, reference["input_ids"][:1])
    expected = reference["last_hidden"][:1]
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=HIDDEN_TOLERANCE * np.abs(expected).max())


def test_every_parameter_is_the_stored_tensor_exactly(tiny_folder):
    decoder, stored = read_folder(tiny_folder), load_file(tiny_folder / "model.safetensors")
    names = parameter_names(decoder.config)
    assert sorted(hub_name(name, decoder.config) for name in names) == sorted(stored)
    for name, leaf in zip(names, jax.tree.leaves(decoder), strict=True):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, stored[hub_name(name, decoder.config)].astype(np.float32))


def test_weights_take_the_dtype_asked_for(llama_folder):
    assert {leaf.dtype for leaf in jax.tree.leaves(read_folder(llama_folder, jnp.bfloat16))} == {jnp.dtype("bfloat16")}


def test_shards_hold_the_same_decoder(llama_folder):
    expected = read_folder(llama_folder)
    split(llama_folder)
    found = read_folder(llama_folder)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_mesh_gets_pieces_of_the_same_weights(llama_folder, monkeypatch):
    asked = []
    get = StoredTensor.__getitem__
    monkeypatch.setattr(StoredTensor, "__getitem__", lambda self, index: asked.append(get(self, index)) or asked[-1])
    rules = MeshRules(make_mesh(data=2, fsdp=2, tensor=2))
    decoder = read_folder(llama_folder, rules=rules)
    assert decoder.rules is rules
    assert decoder.layers[1].query[...].addressable_shards[0].data.shape == (32, 24)
    assert sum(piece.size for piece in asked) == sum(leaf.size for leaf in jax.tree.leaves(decoder))
    assert max(piece.size for piece in asked) == 512 * 48 // 4
    for one, other in zip(jax.tree.leaves(decoder), jax.tree.leaves(read_folder(llama_folder)), strict=True):
        np.testing.assert_array_equal(one, other)


def split(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for file_name, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file_name)
    weight_map = {name: file_name for file_name, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_rotary_buffers_of_old_files_are_ignored(llama_folder):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    edit_weights(llama_folder, lambda tensors: tensors.update(buffer))
    read_folder(llama_folder)


def test_a_tied_head_may_be_stored_again_if_it_is_the_embedding(folder_copy):
    folder = folder_copy("tiny_qwen3")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    edit_weights(folder, lambda tensors: tensors.update({head: tensors[embedding].copy()}))
    assert read_folder(folder).config.tie_embeddings
    edit_weights(folder, lambda tensors: tensors.update({head: tensors[embedding] + tensors[embedding]}))
    assert "'lm_head.weight' differs from the embedding" in refusal(folder)


def test_a_missing_tensor_is_named_with_its_shape(llama_folder):
    edit_weights(llama_folder, lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.weight"))
    assert "tensor 'model.layers.1.mlp.down_proj.weight' with shape (48, 96) is missing" in refusal(llama_folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(llama_folder):
    changed = {"model.norm.weight": np.ones(47, np.float32)}
    edit_weights(llama_folder, lambda tensors: tensors.update(changed))
    message = refusal(llama_folder)
    assert "model.safetensors: tensor 'model.norm.weight' must have shape (48,), it has (47,)" in message


def test_a_transposed_tensor_is_refused(llama_folder):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(llama_folder, lambda tensors: tensors.update({name: tensors[name].T.copy()}))
    assert f"{name!r} must have shape (96, 48), it has (48, 96)" in refusal(llama_folder)


def test_an_unknown_tensor_is_refused(llama_folder):
    extra = {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    edit_weights(llama_folder, lambda tensors: tensors.update(extra))
    assert "1 tensors belong to no parameter, the first is 'model.layers.0.self_attn.q_proj.bias'" in refusal(
        llama_folder
    )


def test_an_8_bit_float_is_refused(llama_folder):
    path, name = llama_folder / "model.safetensors", "model.norm.weight"
    stored = save({name: np.ones(48, np.int8)}).replace(b'"I8"', b'"F8_E4M3"')
    size = int.from_bytes(stored[:8], "little") + len("F8_E4M3") - len("I8")
    path.write_bytes(size.to_bytes(8, "little") + stored[8:])
    with pytest.raises(ValueError, match=r"model\.norm\.weight' has dtype F8_E4M3, allowed"):
        StoredTensor(path, name, safe_open(path, framework="numpy")).checked((48,))


def test_a_quantised_tensor_is_refused(llama_folder):
    changed = {"model.norm.weight": np.ones(48, np.int8)}
    edit_weights(llama_folder, lambda tensors: tensors.update(changed))
    assert "'model.norm.weight' has dtype I8, allowed: ('BF16', 'F16', 'F32')" in refusal(llama_folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 100_000])
def test_a_truncated_file_is_refused(llama_folder, keep):
    path = llama_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path} is not a whole safetensors file" in refusal(llama_folder)


def test_a_file_of_junk_is_refused(llama_folder):
    (llama_folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    assert "is not a whole safetensors file" in refusal(llama_folder)


def test_missing_files_are_named(llama_folder):
    split(llama_folder)
    (llama_folder / "part-2.safetensors").unlink()
    assert "has no part-2.safetensors, which model.safetensors.index.json names" in refusal(
        llama_folder, FileNotFoundError
    )
    (llama_folder / "model.safetensors.index.json").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(llama_folder, FileNotFoundError)
    (llama_folder / "config.json").unlink()
    assert "has no config.json" in refusal(llama_folder, FileNotFoundError)


def test_an_index_that_names_a_tensor_elsewhere_is_refused(llama_folder):
    split(llama_folder)
    index = llama_folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    moved = {"model.norm.weight": "part-1.safetensors"}
    assert weight_map["model.norm.weight"] == "part-2.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map | moved}))
    path = llama_folder / "part-1.safetensors"
    assert f"{path} has no tensor 'model.norm.weight', which {index.name} says it has" in refusal(llama_folder)


def test_a_tensor_in_two_files_is_refused(llama_folder):
    split(llama_folder)
    first, second = (llama_folder / f"part-{number}.safetensors" for number in (1, 2))
    tensors = load_file(first)
    save_file(tensors | {"model.norm.weight": load_file(second)["model.norm.weight"]}, first)
    assert "tensor 'model.norm.weight' is in part-" in refusal(llama_folder)


def test_layers_that_no_file_holds_are_missed_at_once(llama_folder):
    edit_json(llama_folder / "config.json", num_hidden_layers=1000)
    assert "'model.layers.3.self_attn.q_proj.weight' with shape (64, 48) is missing" in refusal(llama_folder)


@pytest.mark.parametrize("file_name", [3, None, "../model.safetensors", ["part-1.safetensors"]])
def test_an_index_that_names_no_file_beside_it_is_refused(llama_folder, file_name):
    (llama_folder / "model.safetensors").unlink()
    index = llama_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file_name}}))
    assert f"{index}: tensor 'model.norm.weight' is in {file_name!r}, allowed: the name of a file" in refusal(
        llama_folder
    )


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(llama_folder, content):
    (llama_folder / "model.safetensors").unlink()
    (llama_folder / "model.safetensors.index.json").write_text(content)
    assert "has no 'weight_map'" in refusal(llama_folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama",', "config.json is not valid JSON"),
        ("", "config.json is not valid JSON"),
        ("[1]", "config.json must hold a JSON object, it holds a list"),
        ('{"model_type": "falcon"}', "config.json: model_type='falcon' is not supported, allowed: one of ('llama'"),
    ],
)
def test_a_damaged_or_unknown_configuration_is_refused(llama_folder, content, message):
    (llama_folder / "config.json").write_text(content)
    assert message in refusal(llama_folder)


def test_the_old_style_of_configuration_loads_the_same_weights(llama_folder):
    shutil.copy(llama_folder / "config_v4.json", llama_folder / "config.json")
    assert read_folder(llama_folder).config.rope_theta == 500000.0


def test_a_configuration_that_does_not_fit_the_weights_is_refused(llama_folder):
    edit_json(llama_folder / "config.json", vocab_size=513)
    assert "'model.embed_tokens.weight' must have shape (513, 48), it has (512, 48)" in refusal(llama_folder)
