import pytest
from serving import NAME
from wordy import MESSAGES, PROMPT, TOKENIZER, VOCAB_SIZE, ids_of


def test_texts_become_ids_and_these_the_texts_again(ask):
    answer = ask("/tokenize", {"prompt": PROMPT, "return_token_strs": True, "model": NAME})
    assert answer["tokens"] == [1, *TOKENIZER.encode(PROMPT)]
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 64
    assert answer["token_strs"] == ["<|bos|>", "th", "e ", "c", "a", "b"]
    plain = ask("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})
    assert (plain["tokens"], plain["token_strs"]) == (answer["tokens"][1:], None)
    assert ask("/detokenize", {"tokens": plain["tokens"]}) == {"prompt": PROMPT}
    assert ask("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": f"<|bos|>{PROMPT}"}
    assert ask("/detokenize", {"tokens": []}) == {"prompt": ""}
    assert ask("/tokenize", {"prompt": ""})["tokens"] == [1]


def test_a_prompt_is_what_the_model_reads(ask):
    body = {"prompt": PROMPT, "top_k": 2, "max_tokens": 1, "return_token_ids": True}
    (choice,) = ask("/v1/completions", body)["choices"]
    assert ask("/tokenize", {"prompt": PROMPT})["tokens"] == choice["prompt_token_ids"]


def test_long_texts(wordy_server, ask):
    """Longer than the model can read, and read on another thread."""
    text = "the cab" * 1000
    tokens = ask("/tokenize", {"prompt": text})["tokens"]
    assert tokens == [1, *ids_of("th", "e ", "c", "a", "b") * 1000]
    assert ask("/detokenize", {"tokens": tokens[1:]})["prompt"] == text
    assert ask("/tokenize", {"messages": [{"role": "user", "content": text}]})["count"] == 5000 + 6
    error = ask("/v1/completions", {"prompt": text, "top_k": 2}, 400)["error"]
    assert "longer than the maximum model length" in error["message"]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31, 10**30])
def test_ids_that_are_none(ask, token_id):
    """P14."""
    error = ask("/detokenize", {"tokens": [3, token_id]}, 400)["error"]
    assert error["param"] == "tokens"
    assert error["message"] == f"tokens must be in [0, {VOCAB_SIZE}), got {token_id}."


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
        ("/detokenize", {"tokens": ["3"]}, "tokens.0"),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0"),
    ],
)
def test_what_is_refused(ask, path, body, param):
    assert ask(path, body, 400)["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model(ask, path):
    assert ask(path, {"prompt": "a"} if path == "/tokenize" else {"tokens": []}) is not None
    body = {"model": "gpt"} | ({"prompt": "a"} if path == "/tokenize" else {"tokens": []})
    assert ask(path, body, 404)["error"]["param"] == "model"


def test_models(wordy_server):
    (card,) = wordy_server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["root"], card["max_model_len"]) == (NAME, "model", NAME, 64)
    assert wordy_server.client.get(f"/v1/models/{NAME}").json() == card
    for name in ("gpt", "a/b", "", "%ff%00"):
        response = wordy_server.client.get(f"/v1/models/{name}")
        assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")
