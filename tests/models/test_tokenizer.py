import pytest

from models.backends import add_around, sentencepiece_bpe
from models.tokenizer import LONG, Tokenizer, check_vocabulary

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
    ("template", "values", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", {}, "<s>Hi"),
        ("{{ 'tools' if tools else 'none' }}{{ think }}", {"think": "no"}, "noneno"),
        ({"default": "plain", "tool_use": "{{ tools | length }}"}, {"tools": [1, 2]}, "2"),
        ({"default": "plain", "tool_use": "{{ tools | length }}"}, {"tools": []}, "plain"),
    ],
)
def test_templates_find_what_the_hub_gives_them(backend, template, values, expected):
    tokenizer = Tokenizer(backend, chat_template=template, template_values={"bos_token": "<s>"})
    assert tokenizer.apply_chat_template(HELLO, **values) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ({"rag": "only this"}, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% if %}", "the chat template is not valid, line 1"),
    ],
)
def test_templates_that_are_missing_or_refuse_are_value_errors(backend, template, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(backend, chat_template=template).apply_chat_template(HELLO)


def test_a_chat_is_encoded_with_one_bos(backend):
    add_around(backend, "<|endoftext|>")
    tokenizer = Tokenizer(backend, chat_template="{{ '<|endoftext|>' }}" + CHATML)
    prompt = tokenizer.apply_chat_template(HELLO)
    assert tokenizer.encode(prompt, add_special_tokens=True).count(0) == 2
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode(prompt)
    assert tokenizer.encode_chat(HELLO).count(0) == 1
    without = tokenizer.encode_chat(HELLO, add_generation_prompt=False)
    assert without == tokenizer.encode_chat(HELLO)[: len(without)]


def test_only_whole_characters_are_encoded(tokenizer):
    with pytest.raises(ValueError, match=r"a string of whole characters, it is 'a\\ud83c'"):
        tokenizer.encode("a\ud83c")


def test_what_decode_shows(tokenizer, bpe_parts):
    num_ids = len(bpe_parts[0])
    assert [tokenizer.is_shown(i) for i in (2, 3, num_ids - 1, num_ids)] == [False, True, True, False]
    assert tokenizer.is_shown(2, skip_special_tokens=False)
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_a_model_has_a_row_for_every_id(tokenizer, backend, bpe_parts):
    num_ids = len(bpe_parts[0])
    check_vocabulary(tokenizer, num_ids, "x.gguf")
    check_vocabulary(tokenizer, num_ids + 100, "x.gguf")  # a padded head
    assert tokenizer.foreign_ids == frozenset()
    with pytest.raises(ValueError, match=f"x.gguf: the tokenizer's largest id is {num_ids - 1}, .*{num_ids - 1} ids"):
        check_vocabulary(tokenizer, num_ids - 1, "x.gguf")


def test_special_tokens_past_the_model_are_refused_where_they_are_written(backend, bpe_parts):
    num_ids = len(bpe_parts[0])
    backend.add_special_tokens(["<image>"])
    tokenizer = Tokenizer(backend)
    check_vocabulary(tokenizer, num_ids, "x.gguf")
    assert tokenizer.foreign_ids == {num_ids}
    assert tokenizer.encode("<imag e>") == Tokenizer(backend).encode("<imag e>")
    with pytest.raises(ValueError, match=f"no row for token '<image>' .{num_ids}."):
        tokenizer.encode("an <image>")


def test_bytes_of_tokens(backend, spm_parts):
    """Joined, they are the text, however its characters were cut."""
    text = "he ď €1\n"
    for tokenizer in (Tokenizer(backend), Tokenizer(sentencepiece_bpe(*spm_parts, unknown_token="<unk>"))):
        token_ids = tokenizer.encode(text)
        assert len(token_ids) > len(text) - 3
        assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(tokenizer.encode("<|im_start|>")[0]) == b"<|im_start|>"


def test_long_texts_are_encoded_as_short_ones(tokenizer, backend):
    text = "".join(TEXTS) * (LONG // 100)
    assert len(text) > LONG
    assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
    add_around(backend, "<|im_start|>")
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *tokenizer.encode(text)]
    with pytest.raises(ValueError, match="text must be a string of whole characters"):
        tokenizer.encode(text + "\ud800")
