from pathlib import Path

import pytest

from models.gguf_tokenizer import read_tokenizer


class Fields:
    """A file's metadata without the file."""

    path = Path("x.gguf")

    def __init__(self, **fields):
        self.fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}

    def metadata(self, name, default=None):
        if name not in self.fields and default is None:
            raise ValueError(f"{self.path}: metadata field {name!r} is missing")
        return self.fields.get(name, default)

    def require(self, name, allowed, default=None):
        value = self.metadata(name, default)
        if value not in allowed:
            raise ValueError(f"{self.path}: {name}={value!r} is not supported, allowed: {allowed}")
        return value


@pytest.fixture
def byte_level(bpe_parts):
    tokens, merges, control = bpe_parts
    return {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [3 if token in control else 1 for token in tokens],
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


@pytest.fixture
def sentencepiece(spm_parts):
    tokens, scores, token_types = spm_parts
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": token_types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "unknown_token_id": 2,
        "add_space_prefix": False,
    }


def tokens_of(tokenizer, text, add_special_tokens=True):
    token_ids = tokenizer.encode(text, add_special_tokens)
    return [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["1", "2"]),
        ({"pre": "llama-bpe"}, ["<|endoftext|>", "12"]),  # llama.cpp's default
        ({"pre": "llama-bpe", "add_bos_token": False}, ["12"]),
        ({"pre": "llama-bpe", "bos_token_id": None}, ["12"]),
        ({"pre": "gpt-2", "add_bos_token": True}, ["<|endoftext|>", "12"]),
        ({"pre": "gpt-2", "add_bos_token": True, "bos_token_id": 1}, ["<|im_start|>", "12"]),
    ],
)
def test_bos_and_words_are_those_of_the_file(byte_level, changes, expected):
    tokenizer = read_tokenizer(Fields(**byte_level | changes))
    assert tokens_of(tokenizer, "12") == expected
    assert tokens_of(tokenizer, "12", add_special_tokens=False) == [token for token in expected if token[0] != "<"]


def test_a_sentencepiece_file(sentencepiece):
    tokenizer = read_tokenizer(Fields(**sentencepiece))
    assert tokens_of(tokenizer, "hello   he<td>") == ["<bos>", "hello", "   ", "he", "<td>"]
    assert tokenizer.byte_tokens[7] == 0
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id)
    assert ids == (1, (0, 3), 0)  # <end_of_turn> ends a reply too
    assert tokens_of(tokenizer, "he", add_special_tokens=False) == ["he"]
    prefixed = read_tokenizer(Fields(**sentencepiece | {"add_space_prefix": None}))  # llama.cpp's default
    assert prefixed.encode("he") == prefixed.encode("he he")[:1]
    assert prefixed.encode("he")[0] != tokenizer.encode("he")[0]


@pytest.mark.parametrize(
    ("changes", "eos_token_ids", "pad_token_id"),
    [
        ({}, (2,), 2),
        ({"padding_token_id": 0}, (2,), 0),
        ({"eot_token_id": 1}, (2, 1), 2),
        ({"eot_token_id": 2}, (2,), 2),
        ({"eos_token_id": None}, (), None),
    ],
)
def test_every_end_of_a_reply_counts(byte_level, changes, eos_token_ids, pad_token_id):
    tokenizer = read_tokenizer(Fields(**byte_level | changes))
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == (eos_token_ids, pad_token_id)


@pytest.mark.parametrize("name", ["<|eot_id|>", "<end_of_turn>"])
def test_the_ends_of_turn_count_only_as_tokens_of_their_own(byte_level, name):
    tokens = ["!" * 9 if token == "12" else token for token in byte_level["tokens"]]
    tokens[0] = name
    fields = byte_level | {"tokens": tokens, "merges": []}
    assert read_tokenizer(Fields(**fields)).eos_token_ids == (2, 0)
    kinds = [1, *fields["token_type"][1:]]
    assert read_tokenizer(Fields(**fields | {"token_type": kinds})).eos_token_ids == (2,)


def test_the_template_finds_the_special_tokens(byte_level):
    file = Fields(**byte_level)
    file.fields["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}"
    tokenizer = read_tokenizer(file)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}]) == "<|endoftext|>he<|im_end|>"
    assert tokenizer.encode_chat([{"role": "user", "content": "he"}]) == [0, tokenizer.encode("he")[0], 2]


def test_user_defined_tokens_stay_in_the_text(byte_level):
    kinds = [*byte_level["token_type"][:-1], 4]
    tokenizer = read_tokenizer(Fields(**byte_level | {"token_type": kinds}))
    assert tokens_of(tokenizer, "12") == ["12"]  # though Qwen takes each digit alone
    assert tokenizer.decode(tokenizer.encode("12")) == "12"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "default"}, "tokenizer.ggml.pre='default' is not supported, allowed: ('gpt-2', 'llama-bpe'"),
        ({"pre": None}, "metadata field 'tokenizer.ggml.pre' is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported, allowed: ('gpt2', 'llama')"),
        ({"merges": ["h x"]}, "x.gguf: merge 'h' + 'x' is not between tokens, to a token"),
        ({"token_type": [1]}, "x.gguf: 262 tokens have 1 types"),
        ({"eos_token_id": 999}, "tokenizer.ggml.eos_token_id=999 must be one of the 262 tokens"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token is true, but there is no bos_token_id"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token=True is not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(byte_level, changes, message):
    with pytest.raises(ValueError) as raised:
        read_tokenizer(Fields(**byte_level | changes))
    assert message in str(raised.value)
    assert str(raised.value).startswith("x.gguf: ")
    assert str(raised.value).count("x.gguf") == 1
