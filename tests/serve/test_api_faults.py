"""Faults that servers like this one had, each by its own input, on every endpoint that it can reach."""

import json
import time

import numpy as np
import pytest
from serving import running_server
from wordy import ENDPOINTS, FLAT, MODEL, PROMPT, VOCAB_SIZE, body_of, ids_of, text_of

EVERY = pytest.mark.parametrize("endpoint", ENDPOINTS)
WITH_IDS = pytest.mark.parametrize("endpoint", ["generate", "completions"])


def refused(ask, endpoint, status=400, **fields):
    """The error of a request, after which another one is answered."""
    error = ask(ENDPOINTS[endpoint], body_of(endpoint, **fields), status)["error"]
    assert error["code"] == status
    assert len(ask(ENDPOINTS[endpoint], body_of(endpoint))["choices"][0]["token_ids"]) == 6
    return error


def answered(ask, endpoint, **fields):
    return ask(ENDPOINTS[endpoint], body_of(endpoint, **fields))


def prompt_field(endpoint, token_ids):
    return {"token_ids" if endpoint == "generate" else "prompt": token_ids}


@EVERY
@pytest.mark.parametrize("token_id", [str(VOCAB_SIZE), "191222", "-1", "abc", "1.5"])
def test_a_bias_of_an_id_that_is_none(ask, endpoint, token_id):
    """P13."""
    assert token_id in refused(ask, endpoint, logit_bias={token_id: 5})["message"]


@EVERY
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_words"])
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 10**30])
def test_ids_that_are_none(ask, endpoint, field, token_id):
    """P14."""
    error = refused(ask, endpoint, **{field: [[5, token_id]] if field == "bad_words" else [5, token_id]})
    assert str(token_id) in error["message"]
    assert field in error["message"]


@WITH_IDS
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 10**30])
def test_prompt_ids_that_are_none(ask, endpoint, token_id):
    """P14."""
    message = refused(ask, endpoint, **prompt_field(endpoint, [3, token_id]))["message"]
    assert str(token_id) in message
    assert f"Vocabulary size: {VOCAB_SIZE}" in message


@EVERY
def test_what_has_no_probability_is_left_out(ask, endpoint):
    """P32 and P87: one id in the support, though three likely ones are asked for."""
    (choice,) = answered(ask, endpoint, top_k=1, logprobs=3)["choices"]
    logprobs = choice["logprobs"]
    if endpoint == "completions":
        assert logprobs["token_logprobs"] == [0] * 6
        assert all(list(top.values()) == [0] for top in logprobs["top_logprobs"])
        return
    for entry in logprobs["content"]:
        assert entry["logprob"] == 0
        assert [top["logprob"] for top in entry["top_logprobs"]] == [0]


@EVERY
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, -(10**12)])
def test_numbers_of_tokens_that_are_none(ask, endpoint, value):
    """P55."""
    assert "max_tokens" in refused(ask, endpoint, max_tokens=value)["message"]


def test_the_prompt_alone(ask):
    """P55: with echo, no tokens are wanted; the prompt's log-probabilities are there."""
    answer = answered(ask, "completions", max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (PROMPT, [], "length")
    assert choice["sampling_mask"] == []
    assert answer["usage"]["completion_tokens"] == 0
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == len(choice["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert values[0] is None
    assert all(value < 0 for value in values[1:])


@EVERY
def test_more_tokens_than_the_context_has_room_for(ask, endpoint):
    """P55, P88: cut, with the reason "length"."""
    answer = answered(ask, endpoint, max_tokens=10**12, ignore_eos=True, allowed_token_ids=[5, 6, 7, 8, 9, 10, 11])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["sampling_mask"])


@pytest.mark.parametrize("num_prompt_tokens", [64, 65, 1000])
def test_a_prompt_that_leaves_no_room(ask, num_prompt_tokens):
    """P88."""
    for endpoint in ("generate", "completions"):
        fields = prompt_field(endpoint, [5] * num_prompt_tokens)
        assert "longer than the maximum model length" in refused(ask, endpoint, **fields)["message"]
    messages = [{"role": "user", "content": "c" * num_prompt_tokens}]
    assert "longer than the maximum model length" in refused(ask, "chat", messages=messages)["message"]


@pytest.mark.parametrize("prompt", [[], [[]], None, [""], ["a", ""], [5, []], {}, [None], [True], [1.5], 3, [[5], "a"]])
def test_prompts_that_are_none(ask, prompt):
    """P56."""
    message = refused(ask, "completions", prompt=prompt, add_special_tokens=False)["message"]
    assert "prompt" in message
    if not isinstance(prompt, dict):
        refused(ask, "generate", token_ids=prompt)


def test_texts_without_words(ask):
    """P56: "" is the model's BOS alone; without one there is no prompt."""
    (choice,) = answered(ask, "completions", prompt="")["choices"]
    assert choice["prompt_token_ids"] == [1]
    (choice,) = answered(ask, "completions", prompt=" ")["choices"]
    assert choice["prompt_token_ids"] == [1, *ids_of(" ")]
    assert "cannot be empty" in refused(ask, "completions", prompt="", add_special_tokens=False)["message"]
    assert "messages" in refused(ask, "chat", messages=[])["message"]
    assert len(answered(ask, "chat", messages=[{"role": "user", "content": ""}])["choices"][0]["token_ids"]) == 6


def written(wordy_server, prompt, **fields):
    """The deltas of a text, and the choice as a whole."""
    body = {"prompt": ids_of(prompt), "top_k": 2, "max_tokens": 9, "logprobs": 1, "return_token_ids": True} | fields
    deltas = [one for event in wordy_server.events(ENDPOINTS["completions"], body) for one in event["choices"]]
    (choice,) = wordy_server.client.post(ENDPOINTS["completions"], json=body).json()["choices"]
    token_body = {"token_ids": ids_of(prompt), "output_mode": "text", "sampling_params": {"top_k": 2, **fields}}
    (same,) = wordy_server.client.post(ENDPOINTS["generate"], json=token_body).json()["choices"]
    for field in ("text", "token_ids", "sampling_mask", "finish_reason", "stop_reason"):
        assert same[field] == choice[field]
    assert [one for delta in deltas for one in delta["token_ids"]] == choice["token_ids"]
    assert [one for delta in deltas for one in delta["sampling_mask"]] == choice["sampling_mask"]
    assert "".join(delta["text"] for delta in deltas) == choice["text"]
    for field, values in choice["logprobs"].items():
        assert [one for delta in deltas for one in delta["logprobs"][field]] == values
    assert len(choice["sampling_mask"]) == len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    return [delta["text"] for delta in deltas], choice


@pytest.mark.parametrize(("prompt", "text"), [("g", "ď"), ("h", "aďb")])
def test_characters_of_several_tokens(wordy_server, prompt, text):
    """P57."""
    deltas, choice = written(wordy_server, prompt)
    assert choice["text"] == text
    assert not any("\ufffd" in delta for delta in deltas)
    begin = text.index("ď")
    assert choice["logprobs"]["text_offset"][begin : begin + 2] == [begin, begin]


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "num_tokens"),
    [
        ("a", "DEFGHIJ", "", 4),
        ("b", "DEFGHIJ", "DEFGX", 4),
        ("c", "own fox", "The quick br", 2),
        ("d", "own fox", "The quick brown dog", 3),
    ],
)
def test_what_may_begin_a_stop_string_waits(wordy_server, prompt, stop, text, num_tokens):
    """P58."""
    _, choice = written(wordy_server, prompt, stop=stop)
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    # Where the stop string did not come, EOS did.
    assert choice["stop_reason"] == (None if text.endswith(("X", "dog")) else stop)
    assert len(choice["token_ids"]) == num_tokens


@pytest.mark.parametrize(("prompt", "stop", "kept"), [("e", "Pari", "Pari"), ("f", "..", "..")])
def test_a_stop_string_inside_of_a_token(wordy_server, prompt, stop, kept):
    """P59: text is cut, the token stays whole with all that is its."""
    for fields, text in (({}, ""), ({"include_stop_str_in_output": True}, kept)):
        _, choice = written(wordy_server, prompt, stop=[stop], **fields)
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop)
        assert len(choice["token_ids"]) == 1


PATHS = [*ENDPOINTS.values(), "/inference/v1/abort_requests", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [b'{"a":1, x}', b"", b"[]", b'"x"', b"null", b"\xff\xfe{", b'{"prompt": "\xff"}', b"[" * 10_000_000, b"{}"],
    ids=lambda body: str(body[:12]),
)
def test_bodies_that_are_none(wordy_server, path, body):
    """P61."""
    for kind in ("application/json", "text/plain"):
        response = wordy_server.client.post(path, content=body, headers={"Content-Type": kind})
        assert response.status_code in (400, 413, 415, 422)
        assert response.json()["error"]["message"]
    assert wordy_server.client.get("/v1/models").status_code == 200


@EVERY
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "-1"),
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "2.5"),
        ("top_p", "0"),
        ("top_p", "-0.1"),
        ("top_p", "1.5"),
        ("top_p", "NaN"),
        ("min_p", "-0.1"),
        ("min_p", "1.1"),
        ("min_p", "NaN"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "-1"),
        ("repetition_penalty", "NaN"),
        ("presence_penalty", "NaN"),
        ("frequency_penalty", "2.1"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("top_k", "true"),
        ("seed", "18446744073709551616"),
        ("logit_bias", '{"5": NaN}'),
        ("timeout", "NaN"),
        ("timeout", "0"),
        ("stop", '[""]'),
        ("stop_token_ids", "[null]"),
    ],
)
def test_values_out_of_range(wordy_server, endpoint, field, value):
    """P62."""
    text = json.dumps(body_of(endpoint, **{field: "HERE"})).replace('"HERE"', value)
    response = wordy_server.client.post(ENDPOINTS[endpoint], content=text, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


@EVERY
@pytest.mark.parametrize("fields", [{"n": 100_000}, {"n": 16384}, {"logprobs": VOCAB_SIZE}, {"logprobs": -1}])
def test_more_than_can_be_had(ask, endpoint, fields):
    """P63: refused at once."""
    started = time.monotonic()
    ask(ENDPOINTS[endpoint], body_of(endpoint, **fields), 400)
    assert time.monotonic() - started < 1


@EVERY
def test_many_completions(ask, endpoint):
    """P63, P66: each has its own ids, supports and log-probabilities, all as long as it is."""
    answer = answered(ask, endpoint, n=64, logprobs=1, max_tokens=7, stop_token_ids=[5, 6, 7, 8])
    assert [choice["index"] for choice in answer["choices"]] == list(range(64))
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    for choice, length in zip(answer["choices"], lengths, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"] if endpoint == "completions" else logprobs["content"]) == length
        assert len(choice["sampling_mask"]) == length
        for token_id, support in zip(choice["token_ids"], choice["sampling_mask"], strict=True):
            assert token_id in support
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 32
    assert answer["usage"]["completion_tokens"] == sum(lengths)


def test_a_seed_counts_everywhere(ask, wordy_server):
    """P65: the same ids, supports and log-probabilities for the same prompt, settings and seed, streamed or not."""
    fields = {"seed": 11, "temperature": 1.2, "top_p": 0.9, "logprobs": 1, "n": 3}
    chat = answered(ask, "chat", **fields)
    same = {"generate": {"token_ids": chat["prompt_token_ids"]}, "completions": {"prompt": chat["prompt_token_ids"]}}
    for endpoint, prompt in same.items():
        for one, other in zip(answered(ask, endpoint, **fields, **prompt)["choices"], chat["choices"], strict=True):
            assert one["token_ids"] == other["token_ids"]
            assert one["sampling_mask"] == other["sampling_mask"]
            assert text_of(one) == text_of(other)
    assert answered(ask, "chat", **{**fields, "seed": 12})["choices"][0]["token_ids"] != chat["choices"][0]["token_ids"]


def test_chat_logprobs_without_a_number(ask):
    """P67."""
    body = body_of("chat") | {"logprobs": True}
    (choice,) = ask(ENDPOINTS["chat"], body)["choices"]
    assert len(choice["logprobs"]["content"]) == 6
    assert all(entry["logprob"] < 0 and entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


@EVERY
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0}, "temperature > 0"),
        ({"top_k": 0}, "top_k > 0 to bound sampling mask size"),
        ({"top_k": -1}, "top_k > 0 to bound sampling mask size"),
        ({"top_k": None}, "top_k > 0 to bound sampling mask size"),
    ],
)
def test_settings_that_supports_cannot_go_with(ask, endpoint, is_streamed, fields, reason):
    """P82: said before anything is streamed; without supports they are fine."""
    body = body_of(endpoint, stream=is_streamed, **fields)
    error = ask(ENDPOINTS[endpoint], body, 400)["error"]
    assert error["message"].startswith(f"sampling distribution replay requires {reason}")
    (choice,) = answered(ask, endpoint, return_sampling_mask=False, **fields)["choices"]
    assert choice["sampling_mask"] is None
    assert len(choice["token_ids"]) == 6


@EVERY
def test_many_stop_ids(ask, endpoint):
    """P84: none of 201 comes before min_tokens tokens."""
    stops = list(range(50, 251))
    (choice,) = answered(ask, endpoint, stop_token_ids=stops, min_tokens=4, max_tokens=40)["choices"]
    assert not set(choice["token_ids"][:4]) & set(stops)
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == choice["token_ids"][-1] in stops


@EVERY
def test_keys_that_nobody_knows(ask, endpoint):
    """P85."""
    assert "colour" in refused(ask, endpoint, colour=3)["message"] + refused(ask, endpoint, colour=3)["param"]
    assert "use_beam_search" in refused(ask, endpoint, use_beam_search=True)["message"]
    assert answered(ask, endpoint, use_beam_search=False, stream_interval=3)["choices"]


def test_a_large_bias_leaves_the_noise(ask):
    """P86: six ids of equal logits and a bias of 1e9 are drawn equally often."""
    biased = [60, 61, 62, 200, 201, 255]
    fields = {"prompt": ids_of(FLAT), "n": 600, "max_tokens": 1, "top_k": 6, "seed": 1}
    answer = answered(ask, "completions", logit_bias={str(token_id): 1e9 for token_id in biased}, **fields)
    drawn = [choice["token_ids"][0] for choice in answer["choices"]]
    counts = np.array([drawn.count(token_id) for token_id in biased])
    assert counts.sum() == 600
    # 20.5: exceeded by one in a thousand seeds.
    assert ((counts - 100) ** 2 / 100).sum() < 20.5
    assert all(choice["sampling_mask"] == [biased] for choice in answer["choices"])


@pytest.fixture(scope="module")
def without_tokenizer():
    with running_server(MODEL, None, is_warm=False) as running:
        yield running


def test_a_model_without_a_tokenizer(without_tokenizer):
    """P83, P85: ids are checked, ids as bad words count, and what needs text is refused."""
    client, path = without_tokenizer.client, ENDPOINTS["completions"]
    refusals = [
        (path, {"prompt": [3, VOCAB_SIZE]}, "Vocabulary size"),
        (path, {"prompt": [3], "bad_words": ["a"]}, "bad_words"),
        (path, {"prompt": [3], "stop": "a"}, "stop strings"),
        (path, {"prompt": "a"}, "tokenizer"),
        (path, {"prompt": [3], "echo": True}, "tokenizer"),
        (ENDPOINTS["chat"], {"messages": [{"role": "user", "content": "a"}]}, "tokenizer"),
        ("/tokenize", {"prompt": "a"}, "tokenizer"),
        ("/detokenize", {"tokens": [3]}, "tokenizer"),
    ]
    for where, body, reason in refusals:
        fields = {"top_k": 3} if where.startswith("/v1") else {}
        response = client.post(where, json={**body, **fields})
        assert response.status_code == 400, response.text
        assert reason in response.json()["error"]["message"]
    body = {"prompt": [3], "max_tokens": 8, "top_k": 2, "seed": 0, "logprobs": 1, "return_token_ids": True}
    # Bad words of another kind: what is compiled serves the next request too.
    first = client.post(path, json={**body, "bad_words": [[254, 255]]}).json()["choices"][0]
    assert first["text"] == ""
    assert first["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in first["token_ids"]]
    bad = first["token_ids"][1:3]
    second = client.post(path, json={**body, "bad_words": [bad]}).json()["choices"][0]
    assert second["token_ids"][:2] == first["token_ids"][:2]
    assert second["token_ids"][2] != bad[1]
    assert bad[1] not in second["sampling_mask"][2]
