import json

import pytest

from models.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hi"}]
TEXTS = (
    "",
    " ",
    "he said: the hedgehog",
    "1234567890 and 12 12",
    "ünïcødé, 日本語, עברית, 🎉👩‍👩‍👧",
    "tabs\tand\n\n  spaces  \r\n",
    "it's we'll don't",
    "\x00\x7f\u200b\ufeff",
    "def f(x):\n    return x**2  # ok\n",
)


@pytest.fixture
def tokenizer(backend):
    return Tokenizer(backend, eos_token_ids=[2], pad_token_id=0, chat_template=CHATML)


def write_folder(folder, backend, **files):
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_join_letters_but_never_digits(tokenizer):
    pieces = [[tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)] for text in ("he he", "12 12")]
    assert pieces == [["he", " he"], ["1", "2", " ", "1", "2"]]


def test_special_tokens_are_one_id_each_and_can_be_shown(tokenizer):
    token_ids = tokenizer.encode("<|im_start|>he<|im_end|>")
    assert token_ids == [1, tokenizer.encode("he")[0], 2]
    assert tokenizer.decode(token_ids) == "he"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|im_start|>he<|im_end|>"


def test_sizes_and_ids(tokenizer, bpe_parts):
    assert tokenizer.vocab_size == len(bpe_parts[0])
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == ((2,), 0)


def test_a_chat_becomes_the_prompt_of_the_template(tokenizer):
    opening = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(HELLO) == opening + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == opening


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s>Hi"),
        ("{% for message in messages %}\n  {{ message['content'] }}\n{% endfor %}", "  Hi\n"),
        ("{% for message in messages %}{% break %}{% endfor %}{{ messages | tojson }}", json.dumps(HELLO)),
        ("{{ 'tools' if tools else 'none' }}{{ think }}", "noneno"),
    ],
)
def test_templates_find_what_the_hub_gives_them(backend, template, expected):
    tokenizer = Tokenizer(backend, chat_template=template, template_values={"bos_token": "<s>"})
    assert tokenizer.apply_chat_template(HELLO, think="no") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ 'a' + none }}", "refuses these messages"),
        ("{% if %}", "refuses these messages"),
    ],
)
def test_templates_that_refuse_or_reach_out_are_value_errors(backend, template, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(backend, chat_template=template).apply_chat_template(HELLO)


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
