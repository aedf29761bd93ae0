import json

import pytest
from tokenizers import AddedToken

from models.backends import add_around, sentencepiece_bpe
from models.tokenizer import Tokenizer

CHATML = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}{% endfor %}"
HELLO = [{"role": "user", "content": "Hi"}]


def write_folder(folder, backend, **files):
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_gives_ids_template_and_special_tokens(tmp_path, backend):
    settings = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "bos_token": None}
    folder = write_folder(tmp_path, backend, tokenizer_config=settings, generation_config={"eos_token_id": [0, 2]})
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ pad_token }}")
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == ((0, 2), 0)
    assert tokenizer.apply_chat_template(HELLO) == "<|im_end|><|endoftext|>"
    assert tokenizer.encode("he 12") == Tokenizer(backend).encode("he 12")


@pytest.mark.parametrize(
    ("settings", "generation", "eos_token_ids", "pad_token_id"),
    [
        ({}, {}, (), None),
        ({}, {"eos_token_id": 2, "pad_token_id": 1}, (2,), 1),
        ({"eos_token": "<|im_end|>"}, {"eos_token_id": 0}, (0, 2), None),
        ({"eos_token": "not a token"}, {"eos_token_id": None}, (), None),
    ],
)
def test_ids_come_from_both_files(tmp_path, backend, settings, generation, eos_token_ids, pad_token_id):
    folder = write_folder(tmp_path, backend, tokenizer_config=settings, generation_config=generation)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == (eos_token_ids, pad_token_id)


@pytest.mark.parametrize(
    "template", [CHATML, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]]
)
def test_the_settings_may_hold_the_template(tmp_path, backend, template):
    folder = write_folder(tmp_path, backend, tokenizer_config={"chat_template": template})
    assert "<|im_start|>user\nHi" in Tokenizer.from_folder(folder).apply_chat_template(HELLO)


def test_a_folder_without_a_tokenizer_gives_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_damaged_files_are_named(tmp_path, backend):
    folder = write_folder(tmp_path, backend)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file"):
        Tokenizer.from_folder(folder)


def test_older_files_name_special_tokens_too(tmp_path, backend, bpe_parts):
    """special_tokens_map.json counts until tokenizer_config.json lists the added tokens itself."""
    more = {"eos_token": {"content": "<|im_end|>"}, "additional_special_tokens": ["he", "not a token"]}
    folder = write_folder(tmp_path, backend, tokenizer_config={"bos_token": "12"}, special_tokens_map=more)
    tokenizer = Tokenizer.from_folder(folder)
    he, twelve = bpe_parts[0].index("he"), bpe_parts[0].index("12")
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((2,), twelve)
    assert tokenizer.special_token_ids == {0, 1, 2, he, twelve}
    assert tokenizer.decode(tokenizer.encode("12he!")) == "!"
    listed = {"bos_token": None, "added_tokens_decoder": {str(he): {"content": "he", "special": False}}}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, tokenizer_config=listed))
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((), None)
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.encode("the") == [tokenizer.encode("t")[0], he]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["<|endoftext|>", "he"]),  # as tokenizer.json has it
        ({"add_bos_token": False, "bos_token": "<|endoftext|>"}, ["he"]),
        ({"add_bos_token": True, "bos_token": "<|im_start|>"}, ["<|im_start|>", "he"]),
        ({"add_bos_token": True, "bos_token": None}, ["he"]),
        ({"add_eos_token": True, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, ["he", "<|im_end|>"]),
    ],
)
def test_the_settings_decide_what_is_put_around_a_text(tmp_path, backend, settings, expected):
    add_around(backend, "<|endoftext|>")
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, tokenizer_config=settings))
    token_ids = tokenizer.encode("he", add_special_tokens=True)
    assert [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids] == expected
    assert tokenizer.encode("he") == token_ids[expected.index("he") : expected.index("he") + 1]


def test_no_text_is_cut_or_padded(tmp_path, backend):
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("lorem ipsum")) == "lorem ipsum"


def test_ids_of_old_models_are_in_their_configuration(tmp_path, backend):
    folder = write_folder(tmp_path, backend, config={"eos_token_id": [2, 0], "pad_token_id": 1})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id, tokenizer.generation_defaults) == ((2, 0), 1, {})


def everything(tokenizer):
    texts = ("he 12 é\n\n<|im_end|>", "<td>  hello")
    return {
        "ids": (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id),
        "special": tokenizer.special_token_ids,
        "encoded": [tokenizer.encode(text, add_special_tokens=more) for text in texts for more in (False, True)],
        "decoded": [tokenizer.decode(tokenizer.encode(text)) for text in texts],
        "bytes": tokenizer.byte_tokens,
    }


def test_a_folder_comes_back_with_all_its_settings(tmp_path, backend):
    backend.add_tokens([AddedToken("<td>", lstrip=True)])
    settings = {
        "bos_token": "<|im_start|>",
        "add_bos_token": True,
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "model_max_length": 77,
        "chat_template": "{{ bos_token }}\r\n{{ messages[0].content }}\n",
    }
    generation = {"eos_token_id": [0], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (tmp_path / "one").mkdir()
    folder = write_folder(tmp_path / "one", backend, tokenizer_config=settings, generation_config=generation)
    first = Tokenizer.from_folder(folder)
    assert first.generation_defaults == generation
    first.save(tmp_path / "deep" / "two")
    second = Tokenizer.from_folder(tmp_path / "deep" / "two")
    assert everything(second) == everything(first)
    assert second.eos_token_ids == (0, 2)
    assert second.generation_defaults == generation
    assert second.apply_chat_template(HELLO) == first.apply_chat_template(HELLO)
    template = settings.pop("chat_template").encode()
    assert (tmp_path / "deep" / "two" / "chat_template.jinja").read_bytes() == template
    assert json.loads((tmp_path / "deep" / "two" / "tokenizer_config.json").read_text()) == settings


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_tokenizer_from_no_folder_writes_all_files(tmp_path, kind, backend, spm_parts):
    if kind == "byte_fallback":
        backend = sentencepiece_bpe(*spm_parts)
        add_around(backend, "<bos>")
    first = Tokenizer(backend, bos_token_id=1, eos_token_ids=[2, 0], pad_token_id=0, chat_template=CHATML)
    first.save(tmp_path)
    second = Tokenizer.from_folder(tmp_path)
    assert everything(second) == everything(first)
    assert second.generation_defaults == {"eos_token_id": [2, 0], "pad_token_id": 0, "bos_token_id": 1}
    names = {name: backend.id_to_token(i) for name, i in (("bos_token", 1), ("eos_token", 2), ("pad_token", 0))}
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert {name: settings[name] for name in names} == names
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_ids_that_were_changed_are_saved(tmp_path, backend):
    folder = write_folder(tmp_path, backend, generation_config={"eos_token_id": 0, "pad_token_id": 0, "top_p": 0.9})
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.eos_token_ids, tokenizer.pad_token_id = (2, 0), 1
    tokenizer.save(folder)
    expected = {"eos_token_id": [2, 0], "pad_token_id": 1, "top_p": 0.9}
    assert Tokenizer.from_folder(folder).generation_defaults == expected


def test_several_templates_are_several_files(tmp_path, backend):
    first = Tokenizer(backend, chat_template={"default": "plain", "tool_use": "{{ tools | length }}"})
    first.save(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools | length }}"
    second = Tokenizer.from_folder(tmp_path)
    assert [second.apply_chat_template(HELLO, tools=tools) for tools in ([1], [])] == ["1", "plain"]
    Tokenizer(backend).save(tmp_path / "one")
    first.save(tmp_path / "one")
    Tokenizer(backend).save(tmp_path / "one")  # no template is left behind
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_folder(tmp_path / "one").apply_chat_template(HELLO)


def test_no_template_is_written_outside_of_the_folder(tmp_path, backend):
    tokenizer = Tokenizer(backend, chat_template={"../../x": "no"})
    with pytest.raises(ValueError, match=r"chat template '\.\./\.\./x' cannot be a file's name"):
        tokenizer.save(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
