"""OpenAI's endpoints with a real tokenizer and chat template, and a model that writes any of its ids."""

import jax.numpy as jnp
import numpy as np
import pytest
from serving import running_server
from wordy import Scored

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say ď in 日本."}]
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay ď in 日本.<|im_end|>\n<|im_start|>assistant\n"
)
pytestmark = pytest.mark.slow
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Seven states, so that a table over all ids stays small; half of the ids are parts of characters.
NUM_STATES = 7


@pytest.fixture(scope="module")
def running(smollm2_tokenizer):
    vocab_size = smollm2_tokenizer.vocab_size
    table = np.random.default_rng(0).normal(size=(NUM_STATES, vocab_size)).astype(np.float32)
    parts = smollm2_tokenizer.encode("ď日本語🎉\u200bü")
    table[:, parts] += 6
    with running_server(Scored(jnp.asarray(table)), smollm2_tokenizer, is_warm=False) as running:
        # What is compiled for it serves all that asks for less.
        post(running, COMPLETIONS, prompt="a", logprobs=2)
        yield running


def post(running, path, **body):
    response = running.client.post(path, json={"top_k": 12, "seed": 1, "max_tokens": 20, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_chat_template(running, smollm2_tokenizer):
    tokens = running.client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert tokens == smollm2_tokenizer.encode(RENDERED)
    assert running.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == RENDERED
    assert post(running, CHAT, messages=MESSAGES, return_token_ids=True)["prompt_token_ids"] == tokens
    last = {"role": "assistant", "content": "It is "}
    body = {"messages": [*MESSAGES, last], "continue_final_message": True}
    tokens = running.client.post("/tokenize", json=body).json()["tokens"]
    assert smollm2_tokenizer.decode(tokens, skip_special_tokens=False) == RENDERED + "It is "


def test_a_template_that_refuses(running):
    body = {"messages": [{"role": "user", "content": None}], "max_tokens": 2}
    response = running.client.post(CHAT, json=body)
    assert response.status_code == 400
    assert "messages[0] must have a 'content'" in response.json()["error"]["message"]


def test_no_empty_prompt_without_a_bos(running):
    """P56."""
    response = running.client.post(COMPLETIONS, json={"prompt": "", "top_k": 3})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "The decoder prompt cannot be empty")


def test_bytes_of_a_reply_are_its_text(running):
    """P57: also where a character takes several tokens."""
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "skip_special_tokens": False}
    (choice,) = post(running, CHAT, **body)["choices"]
    content = choice["logprobs"]["content"]
    said = b"".join(bytes(entry["bytes"]) for entry in content)
    assert said.decode(errors="replace") == choice["message"]["content"]
    assert any(entry["token"] == "\ufffd" for entry in content)


@pytest.mark.parametrize("seed", range(6))
def test_streams_are_the_whole_text(running, seed):
    body = {"prompt": "Once 日本", "top_k": 12, "seed": seed, "max_tokens": 24, "logprobs": 0, "echo": True}
    (choice,) = post(running, COMPLETIONS, **body)["choices"]
    deltas = [one for event in running.events(COMPLETIONS, body) for one in event["choices"]]
    assert "".join(delta["text"] for delta in deltas) == choice["text"]
    for field, values in choice["logprobs"].items():
        assert [value for delta in deltas for value in delta["logprobs"][field]] == values
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert choice["text"].startswith(token, offset)


def test_several_texts_without_supports(running):
    body = {"temperature": 0, "top_k": 0, "return_sampling_mask": False}
    answer = post(running, COMPLETIONS, prompt=["a", "日本"], **body)
    assert [choice["sampling_mask"] for choice in answer["choices"]] == [None, None]
    (alone,) = post(running, COMPLETIONS, prompt="日本", **body)["choices"]
    assert alone["text"] == answer["choices"][1]["text"]
