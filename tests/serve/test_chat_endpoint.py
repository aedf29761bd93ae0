import math

import pytest
from serving import NAME
from wordy import MESSAGES, TOKENIZER

PATH = "/v1/chat/completions"
PLAIN = {"messages": MESSAGES, "top_k": 7, "seed": 2, "max_tokens": 6}


def prompt_ids(ask, **fields):
    """The ids of a prompt, as both /tokenize and the endpoint tell them."""
    token_ids = ask(PATH, PLAIN | {"return_token_ids": True, **fields})["prompt_token_ids"]
    assert ask("/tokenize", {"messages": MESSAGES, **fields})["tokens"] == token_ids
    return token_ids


def test_a_reply(ask):
    answer = ask(PATH, PLAIN | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "request_id": "mine"})
    (choice,) = answer["choices"]
    assert (answer["id"], answer["object"], answer["model"]) == ("chatcmpl-mine", "chat.completion", NAME)
    assert choice["message"] == {
        "role": "assistant",
        "content": TOKENIZER.decode(choice["token_ids"]),
        "refusal": None,
        "tool_calls": [],
    }
    assert answer["prompt_token_ids"] == TOKENIZER.encode("<|bos|>u:the cab;a:")
    num_prompt = len(answer["prompt_token_ids"])
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 6 == num_prompt + 6
    for token_id, support, entry in zip(
        choice["token_ids"], choice["sampling_mask"], choice["logprobs"]["content"], strict=True
    ):
        assert entry["token"] == TOKENIZER.decode([token_id], skip_special_tokens=False)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert token_id in support
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 2
        assert tops == sorted(tops, reverse=True)
        # The likeliest ones; the drawn one is among them only where it is.
        assert entry["logprob"] <= tops[0]
        assert (entry["token"] in [top["token"] for top in entry["top_logprobs"]]) == (entry["logprob"] >= tops[1])


def test_all_that_is_in_the_support_adds_up(ask):
    (choice,) = ask(PATH, PLAIN | {"logprobs": True, "top_logprobs": 5, "top_k": 4})["choices"]
    for entry, support in zip(choice["logprobs"]["content"], choice["sampling_mask"], strict=True):
        assert len(entry["top_logprobs"]) == len(support) == 4
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) == pytest.approx(1, abs=1e-5)


def test_the_deltas_of_a_stream_are_the_whole_reply(wordy_server, ask):
    body = PLAIN | {"n": 3, "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "max_tokens": 9}
    answer = ask(PATH, body)
    events = wordy_server.events(PATH, body | {"stream_options": {"include_usage": True}})
    assert events.pop()["usage"] == answer["usage"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert all(len(event["choices"]) == 1 for event in events)
    for choice in answer["choices"]:
        first, *rest = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"]["content"] for one in rest) == choice["message"]["content"]
        for field in ("token_ids", "sampling_mask"):
            assert [entry for one in rest for entry in one[field]] == choice[field]
        assert [entry for one in rest for entry in one["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [one["finish_reason"] for one in rest] == [None] * (len(rest) - 1) + [choice["finish_reason"]]


def test_contents_in_parts(ask):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cab"}]
    whole = ask("/tokenize", {"messages": [{"role": "user", "content": [parts[0]]}]})
    assert whole["tokens"] == ask("/tokenize", {"messages": [{"role": "user", "content": "the "}]})["tokens"]
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    error = ask(PATH, PLAIN | {"messages": [{"role": "user", "content": [image]}]}, 400)["error"]
    assert "messages[0].content must hold parts" in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "a"},
        {"role": 3, "content": "a"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [3]},
        {"role": "user", "content": [{"type": "text", "text": 3}]},
        {"role": "assistant", "content": "a", "tool_calls": 3},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"arguments": "{"}}]},
    ],
)
def test_messages_that_are_none(ask, message):
    for path, body in ((PATH, PLAIN), ("/tokenize", {})):
        assert "messages[1]" in ask(path, body | {"messages": [*MESSAGES, message]}, 400)["error"]["message"]


def test_what_the_template_is_told(ask):
    opened = TOKENIZER.encode("<|bos|>u:the cab;a:")
    assert prompt_ids(ask) == opened
    assert prompt_ids(ask, add_generation_prompt=False) == opened[:-2]
    # The template of these tests writes the names that it is given.
    assert prompt_ids(ask, chat_template_kwargs={"x": 1, "j": 2}) == opened + TOKENIZER.encode("jx")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt_ids(ask, tools=tools) == opened + TOKENIZER.encode("tools")
    assert prompt_ids(ask, add_special_tokens=True) == [1, *opened]
    for name in ("messages", "add_generation_prompt", "self"):
        error = ask(PATH, PLAIN | {"chat_template_kwargs": {name: 1}}, 400)["error"]
        assert name in error["message"]


def test_the_last_message_goes_on(ask):
    messages = [*MESSAGES, {"role": "assistant", "content": "the"}]
    fields = {"messages": messages, "continue_final_message": True}
    expected = TOKENIZER.encode("<|bos|>u:the cab;a:the")
    assert ask("/tokenize", fields)["tokens"] == expected
    assert ask("/tokenize", fields | {"add_generation_prompt": False})["tokens"] == expected
    error = ask(PATH, PLAIN | fields | {"add_generation_prompt": True}, 400)["error"]
    assert error["message"].startswith("Cannot set both `continue_final_message` and `add_generation_prompt`")
    error = ask(PATH, PLAIN | fields | {"messages": [{"role": "user", "tool_calls": []}]}, 400)["error"]
    assert "continue_final_message needs a last message with a text" in error["message"]


def test_a_message_that_the_template_refuses(ask):
    error = ask(PATH, PLAIN | {"messages": [{"role": "user", "content": "ß"}]}, 400)["error"]
    assert "no token begins" in error["message"]


@pytest.mark.parametrize(
    ("choice", "status"), [("none", 200), ("auto", 200), (None, 200), ("required", 400), ({}, 400)]
)
def test_tool_choice(ask, choice, status):
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = ask(PATH, PLAIN | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": True}, status)
    assert status == 200 or answer["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"top_logprobs": 2}, "`logprobs` must be set to true"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 6}, "greater than max allowed: 5"),
        ({"logprobs": True, "top_logprobs": -2}, "logprobs must be non-negative or -1"),
        ({"max_completion_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_completion_tokens": "3"}, "max_completion_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"prompt": "a"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"model": "gpt"}, "gpt"),
    ],
)
def test_what_is_refused(ask, fields, reason):
    status = 404 if "model" in fields else 400
    error = ask(PATH, PLAIN | fields, status)["error"]
    assert reason in f"{error['message']} {error['param']}"


def test_how_long_a_reply_may_be(ask):
    """The later name goes before the earlier one; without either, the context is filled."""
    body = {"messages": MESSAGES, "top_k": 7, "ignore_eos": True, "seed": 1}
    assert ask(PATH, body | {"max_tokens": 9, "max_completion_tokens": 4})["usage"]["completion_tokens"] == 4
    answer = ask(PATH, body)
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"
