import json
from pathlib import Path

import pytest
from serving import NAME
from wordy import PROMPT, SCRIPTS, TOKENIZER, ids_of

PATH = "/v1/completions"
RECORDING = Path(__file__).parents[1] / "data" / "vllm_openai.jsonl"
RECORDED = [json.loads(line) for line in RECORDING.read_text().splitlines()]
# Of parts of vLLM that are not here.
ABSENT = {"routed_experts", "kv_transfer_params", "ec_transfer_params", "metrics", "completion_tokens_details"}
OWN = {"sampling_mask", "weight_versions"}
PLAIN = {"prompt": PROMPT, "top_k": 7, "seed": 2, "max_tokens": 6}


def pieces(wordy_server, body):
    """The pieces of each choice of a stream, by index, without the events of usage alone."""
    found = {}
    for event in wordy_server.events(PATH, body):
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return [found[index] for index in range(len(found))]


def keys(value, prefix=""):
    """Names of all fields, nested ones with a dot; of a list, those of its first element."""
    if isinstance(value, list):
        return keys(value[0], prefix) if value else set()
    if not isinstance(value, dict) or "top_logprobs" in prefix:
        return set()
    return {prefix + name for name in value} | {one for name in value for one in keys(value[name], f"{prefix}{name}.")}


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_the_fields_are_those_of_vllm(wordy_server, number):
    recorded = RECORDED[number]
    prompt = PROMPT if isinstance(recorded["request"]["prompt"], str) else ids_of("a", "b", "c")
    body = recorded["request"] | {"prompt": prompt, "model": NAME}
    if not recorded["request"].get("stream"):
        answer = wordy_server.client.post(PATH, json=body).json()
        expected = {name for name in keys(recorded["response"]) if name.rpartition(".")[2] not in ABSENT}
        assert keys(answer) == expected | {f"choices.{name}" for name in OWN} | (
            {"choices.weight_versions.version", "choices.weight_versions.start", "choices.weight_versions.end"}
        )
        assert answer["object"] == recorded["response"]["object"]
        assert answer["id"].startswith("cmpl-")
        for choice in answer["choices"]:
            assert len(choice["logprobs"]["tokens"]) == body["max_tokens"]
            tops = zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
            assert all(token in top and body["logprobs"] <= len(top) <= body["logprobs"] + 1 for token, top in tops)
        return
    events = wordy_server.events(PATH, body)
    assert recorded["stream"][-1] == "[DONE]"
    for event, expected in ((events[0], recorded["stream"][0]), (events[-1], recorded["stream"][-2])):
        assert keys(expected) - keys(event) <= {"system_fingerprint"}
    assert events[-1]["choices"] == recorded["stream"][-2]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == recorded["stream"][-2]["usage"]["completion_tokens"] == 8


def test_several_prompts(wordy_server, ask):
    """Choices go by prompt, then by number; the deltas of a stream are the whole answer."""
    body = PLAIN | {"prompt": [ids_of("j", "k"), ids_of("l")], "n": 2, "logprobs": 2, "return_token_ids": True}
    answer = ask(PATH, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids_of("j", "k")] * 2 + [ids_of("l")] * 2
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 24
    assert ask(PATH, body | {"prompt": ["jk", "l"], "add_special_tokens": False})["choices"] == answer["choices"]
    for own, prompt in ((answer["choices"][:2], ids_of("j", "k")), (answer["choices"][2:], ids_of("l"))):
        alone = ask(PATH, body | {"prompt": prompt})["choices"]
        assert [one["token_ids"] for one in alone] == [one["token_ids"] for one in own]
    streamed = pieces(wordy_server, body)
    for deltas, choice in zip(streamed, answer["choices"], strict=True):
        assert "".join(delta["text"] for delta in deltas) == choice["text"]
        for field in ("token_ids", "sampling_mask"):
            assert [one for delta in deltas for one in delta[field]] == choice[field]
        for field in choice["logprobs"]:
            assert [one for delta in deltas for one in delta["logprobs"][field]] == choice["logprobs"][field]
        assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert [delta["prompt_token_ids"] for delta in deltas] == [choice["prompt_token_ids"]] + [None] * (
            len(deltas) - 1
        )


def test_what_a_token_says_begins_at_its_offset(ask):
    (choice,) = ask(PATH, PLAIN | {"logprobs": 0, "max_tokens": 20, "skip_special_tokens": False})["choices"]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in token:
            assert choice["text"].startswith(token, offset)


@pytest.mark.parametrize("is_text", [True, False])
def test_echo(wordy_server, ask, is_text):
    prompt = PROMPT if is_text else TOKENIZER.encode(PROMPT, add_special_tokens=True)
    body = PLAIN | {"prompt": prompt, "echo": True, "logprobs": 1, "n": 2, "return_token_ids": True}
    answer = ask(PATH, body)
    plain = ask(PATH, body | {"echo": False})
    for choice, alone in zip(answer["choices"], plain["choices"], strict=True):
        num_prompt, logprobs = len(choice["prompt_token_ids"]), choice["logprobs"]
        assert choice["text"] == PROMPT + alone["text"]
        assert choice["token_ids"] == alone["token_ids"]
        assert choice["sampling_mask"] == alone["sampling_mask"]
        assert logprobs["tokens"][num_prompt:] == alone["logprobs"]["tokens"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["tokens"][:num_prompt] == ["<|bos|>", "th", "e ", "c", "a", "b"]
        assert logprobs["text_offset"][:num_prompt] == [0, 0, 2, 4, 5, 6]
        assert logprobs["text_offset"][num_prompt:] == [7 + offset for offset in alone["logprobs"]["text_offset"]]
        assert len(choice["prompt_logprobs"]) == num_prompt
        own = choice["prompt_logprobs"][1][str(choice["prompt_token_ids"][1])]
        assert own["logprob"] == logprobs["token_logprobs"][1]
        assert own["decoded_token"] == "th"
    for deltas, choice in zip(pieces(wordy_server, body), answer["choices"], strict=True):
        assert "".join(delta["text"] for delta in deltas) == choice["text"]
        for field, values in choice["logprobs"].items():
            assert [one for delta in deltas for one in delta["logprobs"][field]] == values


def test_a_stream_of_the_prompt_alone(wordy_server):
    ((delta,),) = pieces(wordy_server, PLAIN | {"echo": True, "max_tokens": 0, "logprobs": 0})
    assert (delta["text"], delta["finish_reason"], delta["sampling_mask"]) == (PROMPT, "length", [])
    assert len(delta["logprobs"]["tokens"]) == 6


def test_prompt_logprobs(ask):
    (choice,) = ask(PATH, PLAIN | {"prompt_logprobs": 2})["choices"]
    assert choice["prompt_logprobs"][0] is None
    for entries in choice["prompt_logprobs"][1:]:
        assert 2 <= len(entries) <= 3
        assert {1, 2} <= {entry["rank"] for entry in entries.values()}
    assert choice["logprobs"] is None


def test_usage_of_streams(wordy_server):
    body = PLAIN | {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *events, last = wordy_server.events(PATH, body)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (6, 12)
    assert not any("usage" in event for event in wordy_server.events(PATH, PLAIN))


def test_tokens_as_ids(ask):
    body = PLAIN | {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = ask(PATH, body)["choices"]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))


def test_two_arrays_for_supports(ask):
    (lists,) = ask(PATH, PLAIN)["choices"]
    (arrays,) = ask(PATH, PLAIN | {"sampling_mask_format": "base64"})["choices"]
    assert set(arrays["sampling_mask"]) == {"token_ids", "offsets"}
    assert arrays["text"] == lists["text"]
    (without,) = ask(PATH, PLAIN | {"return_sampling_mask": False})["choices"]
    assert without["sampling_mask"] is None
    assert without["text"] == lists["text"]


def test_sixteen_tokens_unless_told_otherwise(ask):
    body = {"prompt": PROMPT, "top_k": 7, "ignore_eos": True, "seed": 1}
    assert ask(PATH, body)["usage"]["completion_tokens"] == 16


def test_stop_and_its_reason(ask):
    body = {"prompt": ids_of("a"), "top_k": 2, "max_tokens": 9, "return_token_ids": True}
    (choice,) = ask(PATH, body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("".join(SCRIPTS["a"]), "stop", None)
    (choice,) = ask(PATH, body | {"stop_token_ids": ids_of("HI")})["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("DEFG", *ids_of("HI"))
    (choice,) = ask(PATH, body | {"stop": ["H", "G"], "include_stop_str_in_output": True})["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("DEFG", "G")


def test_names(wordy_server, ask):
    assert ask(PATH, PLAIN | {"request_id": "mine"})["id"] == "cmpl-mine"
    assert {event["id"] for event in wordy_server.events(PATH, PLAIN | {"request_id": "mine"})} == {"cmpl-mine"}
    assert ask(PATH, PLAIN | {"model": NAME})["model"] == NAME
    error = ask(PATH, PLAIN | {"model": "gpt"}, 404)["error"]
    assert (error["type"], error["param"]) == ("NotFoundError", "model")


@pytest.mark.parametrize(
    "field", ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "session_id"]
)
def test_fields_that_change_nothing(ask, field):
    value = {"metadata": {"a": "b"}, "store": True, "session_id": None}.get(field, "auto")
    assert ask(PATH, PLAIN | {field: value})["choices"] == ask(PATH, PLAIN)["choices"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 2),
        ("truncate_prompt_tokens", 3),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
        ("prompt_embeds", "AA=="),
        ("priority", 1),
    ],
)
def test_fields_that_would_change_something(ask, field, value):
    assert field in ask(PATH, PLAIN | {field: value}, 400)["error"]["message"]


@pytest.mark.parametrize("half", ["\\ud800", "a\\udfff"])
def test_halves_of_characters(wordy_server, half):
    for field in ("prompt", "request_id", "model", "stop", "user", "unknown"):
        text = json.dumps(PLAIN | {field: "HERE"}).replace("HERE", half)
        response = wordy_server.client.post(PATH, content=text, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]


def test_wrong_methods_and_paths(wordy_server):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/inference/v1/generate"):
        response = wordy_server.client.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (405, 405)
        assert response.headers["allow"] == "POST"
    response = wordy_server.client.post("/v1/embeddings", json={})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")
