import base64
import json

import numpy as np
import pytest
import scipy.stats
from engine_models import EOS, MODEL, PROMPTS, V, answer_alone, known_model
from serving import NAME, SAMPLING, running_server

from jaxmask import wire
from serve.config import EngineConfig
from serve.engine import Engine

PATH = "/inference/v1/generate"
REPLAY = "sampling distribution replay requires "
TOP_K = REPLAY + "top_k > 0 to bound sampling mask size, reduce transfer overhead, and avoid potential OOMs"


@pytest.fixture(scope="module")
def running():
    with running_server() as running:
        yield running


def sampling(**changes):
    return SAMPLING | changes


def refused(running, body, *words):
    """A 400 that says so, before anything is streamed; and the server answers the next request."""
    for stream in (False, True):
        response = running.client.post(PATH, json=body | {"stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        for word in words:
            assert word in error["message"]
    assert running.generate([5], sampling_params={"top_k": 2})["choices"][0]["finish_reason"]
    return error


def test_fields_that_vllm_has_and_we_do_not_are_null(running):
    body = running.generate(PROMPTS[2])
    (choice,) = body["choices"]
    names = ["prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params"]
    assert [body[name] for name in names] == [None] * 5
    assert choice["routed_experts"] is None
    events = running.events(PATH, {"token_ids": PROMPTS[2], "sampling_params": SAMPLING})
    assert [event["usage"] for event in events] == [None] * len(events)
    assert events[0]["choices"][0]["routed_experts"] is None


def test_an_answer_is_what_the_engine_says(running):
    body = running.generate(PROMPTS[2], request_id="mine", model=NAME, return_token_ids=True)
    (output,) = answer_alone(PROMPTS[2], SAMPLING)
    (completion,), (choice,) = output.outputs, body["choices"]
    assert body["request_id"] == "generate-tokens-mine"
    assert body["model"] == NAME
    assert body["prompt_token_ids"] == PROMPTS[2]
    assert body["usage"]["total_tokens"] == len(PROMPTS[2]) + 9
    assert choice["token_ids"] == completion.token_ids
    assert choice["sampling_mask"] == completion.sampling_mask.token_ids
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 9}]
    for token, entry, expected in zip(
        choice["token_ids"], choice["logprobs"]["content"], completion.logprobs, strict=True
    ):
        assert entry["token_id"] == token
        listed = {top["token_id"]: (top["logprob"], top["rank"]) for top in entry["top_logprobs"]}
        assert listed == {token_id: (one.logprob, one.rank) for token_id, one in expected.items()}


def test_the_deltas_of_a_stream_are_the_whole_answer(running):
    fields = {"token_ids": PROMPTS[2], "sampling_params": sampling(n=2)}
    choices = running.generate(**fields)["choices"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = running.events(PATH, fields | {"stream_options": options})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 18 == events[-1]["usage"]["completion_tokens"]
    for choice in choices:
        deltas = [delta for event in events for delta in event["choices"] if delta["index"] == choice["index"]]
        for field in ("token_ids", "sampling_mask"):
            assert [entry for delta in deltas for entry in delta[field]] == choice[field]
        assert [entry for delta in deltas for entry in delta["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert len(choice["sampling_mask"]) == len(choice["token_ids"]) == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0}, [REPLAY + "temperature > 0"]),
        ({"top_k": 0}, [TOP_K]),
        ({"top_k": -1}, [TOP_K]),
        ({"top_k": None}, [TOP_K]),
        ({"logit_bias": {"191222": -100}}, ["191222", f"Vocabulary size: {V}"]),
        ({"logit_bias": {"-1": 1.0}}, ["-1"]),
        ({"logit_bias": {"abc": 1.0}}, ["abc"]),
        ({"stop_token_ids": [V]}, ["stop_token_ids", str(V)]),
        ({"allowed_token_ids": [3, -4]}, ["allowed_token_ids", "-4"]),
        ({"bad_words": [[4, V + 7]]}, ["bad_words", str(V + 7)]),
        ({"logprobs": V}, ["Requested sample logprobs of"]),
        ({"n": 100_000}, ["n must be in [1, 16384], got 100000"]),
        ({"n": 5000}, ["n must be at most"]),
        ({"top_q": 0.5}, ["top_q"]),
        ({"structured_outputs": {"json": {}}}, ["structured_outputs is not supported"]),
        ({"top_k": True}, ["top_k"]),
        ({"top_k": 1.5}, ["top_k"]),
        ({"max_tokens": "3"}, ["max_tokens"]),
        ({"max_tokens": 0}, ["max_tokens must be at least 1, got 0."]),
        ({"seed": 2**64}, ["seed must be in"]),
        ({"stop": "", "detokenize": True}, ["stop"]),
        ({"stop": "a", "detokenize": False}, ["stop strings are only supported when detokenize is True"]),
    ],
)
def test_what_cannot_be_answered_is_a_400_that_names_it(running, changes, words):
    """P13, P14, P62, P63, P82, P85."""
    params = {name: value for name, value in sampling(**changes).items() if value is not None}
    refused(running, {"token_ids": PROMPTS[0], "sampling_params": params}, *words)


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [([], []), ([V], [str(V), f"Vocabulary size: {V}"]), ([-1], ["-1"]), (None, []), ("text", []), ([3] * 64, ["64"])],
)
def test_a_prompt_that_cannot_be_read_is_a_400(running, token_ids, words):
    """P56, P83."""
    refused(running, {"token_ids": token_ids, "sampling_params": SAMPLING}, "token_ids" if not words else "", *words)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_numbers_that_are_none_are_refused(running, field, number):
    """P62."""
    text = json.dumps({"token_ids": [5], "sampling_params": sampling(**{field: 0.5})})
    text = text.replace(f'"{field}": 0.5', f'"{field}": {number}')
    response = running.client.post(PATH, content=text, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"a":1, x}', 400),
        (b"", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b"\xff\xfe{", 400),
        (b"[" * 10_000_000, 400),
        (b" " * (2**25 + 1), 413),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_no_request_is_a_json_error(running, content, status, is_chunked):
    """P61."""
    sent = iter([content[: len(content) // 2], content[len(content) // 2 :]]) if is_chunked else content
    response = running.client.post(PATH, content=sent, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert running.generate([5])["choices"]


def test_stop_strings_and_stop_ids_count(running):
    """P60: with a tokenizer they end the completion; the last token stays whole, with its support."""
    (free,) = running.generate(PROMPTS[2], output_mode="text")["choices"]
    stop = free["text"][3:5]
    (choice,) = running.generate(PROMPTS[2], output_mode="text", sampling_params=sampling(stop=stop))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == free["text"][: free["text"].index(stop)]
    assert len(choice["token_ids"]) == len(choice["sampling_mask"]) == len(choice["logprobs"]["content"]) < 9
    stop_id = free["token_ids"][4]
    (choice,) = running.generate(PROMPTS[2], sampling_params=sampling(stop_token_ids=[stop_id]))["choices"]
    assert choice["stop_reason"] == stop_id == choice["token_ids"][-1]


def test_without_a_tokenizer_what_needs_one_is_a_400_and_bad_words_work():
    """P85, P83."""
    with running_server(tokenizer=None, is_warm=False) as running:
        for changes in ({"stop": "a"}, {"bad_words": ["a"]}):
            refused(running, {"token_ids": [5], "sampling_params": sampling(**changes)}, next(iter(changes)))
        refused(running, {"token_ids": [5], "sampling_params": SAMPLING, "output_mode": "text"}, "output_mode")
        refused(running, {"token_ids": [V + 3], "sampling_params": SAMPLING}, str(V + 3))
        (free,) = running.generate([5], sampling_params=sampling(max_tokens=20))["choices"]
        banned = free["token_ids"][0]
        (choice,) = running.generate([5], sampling_params=sampling(max_tokens=20, bad_words=[[banned]]))["choices"]
        assert banned not in choice["token_ids"]
        assert all(banned not in kept for kept in choice["sampling_mask"])


def test_many_stop_ids_and_many_samples(running):
    """P84, P63, P66: no hidden limit, and choices do not overwrite each other."""
    many = list(range(3, V)) * 6
    assert len(many) > 201
    (choice,) = running.generate([5], sampling_params=sampling(stop_token_ids=many, min_tokens=3))["choices"]
    # All ids but three end a completion, and none of them comes sooner.
    assert set(choice["token_ids"][:3]) <= {0, 1, 2} - {EOS}
    assert choice["finish_reason"] in ("stop", "length")
    body = running.generate([5], sampling_params=sampling(n=64, max_tokens=4))
    assert [choice["index"] for choice in body["choices"]] == list(range(64))
    assert len({tuple(choice["token_ids"]) for choice in body["choices"]}) > 8
    assert all(len(choice["sampling_mask"]) == len(choice["token_ids"]) for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in body["choices"])


def test_huge_biases_are_clamped_and_ties_are_drawn_alike(running):
    """P86, at a false-alarm rate of 1e-6."""
    ids = [10, 14, 18, 22, 26, 30]
    bias = dict.fromkeys(map(str, ids), 1e9)
    # All logits of this model are within 10, so that after the clamp these six differ by their own logits.
    body = running.generate(
        [5], sampling_params=sampling(logit_bias=bias, n=300, max_tokens=1, temperature=2.0, min_p=0)
    )
    drawn = [choice["token_ids"][0] for choice in body["choices"]]
    (support,) = body["choices"][0]["sampling_mask"]
    logits = np.asarray(MODEL.logits([5]), np.float64)[support] / 2
    expected = np.exp(logits - logits.max())
    counts = [drawn.count(token_id) for token_id in support]
    assert scipy.stats.chisquare(counts, len(drawn) * expected / expected.sum()).pvalue > 1e-6
    assert len(support) > 3


def test_only_ids_of_the_support_have_logprobs_and_all_json_is_strict(running):
    """P32, P87."""
    params = sampling(top_k=1, logprobs=5)
    response = running.client.post(PATH, json={"token_ids": [5], "sampling_params": params})

    def refuse(constant):
        raise AssertionError(constant)

    (choice,) = json.loads(response.content, parse_constant=refuse)["choices"]
    for support, entry in zip(choice["sampling_mask"], choice["logprobs"]["content"], strict=True):
        assert [top["token_id"] for top in entry["top_logprobs"]] == support == [entry["token_id"]]
        assert entry["logprob"] == 0


def test_a_prompt_with_little_room_is_cut(running):
    """P88."""
    for max_tokens in (1000, 10**12, None):
        (choice,) = running.generate([3] * 60, sampling_params=sampling(max_tokens=max_tokens, ignore_eos=True))[
            "choices"
        ]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (4, "length")


def test_one_request_can_go_without_a_mask(running):
    params = {"temperature": 0, "max_tokens": 4, "return_sampling_mask": False, "ignore_eos": True}
    (choice,) = running.generate([5], sampling_params=params)["choices"]
    assert choice["sampling_mask"] is None
    prefix = [5]
    for token in choice["token_ids"]:
        assert token == int(np.argmax(np.asarray(MODEL.logits(prefix))))
        prefix.append(token)


def test_masks_as_two_arrays(running):
    (lists,) = running.generate(PROMPTS[3])["choices"]
    (arrays,) = running.generate(PROMPTS[3], sampling_mask_format="base64")["choices"]
    mask = arrays["sampling_mask"]
    ids, offsets = (np.frombuffer(base64.b64decode(mask[name]), "<i4") for name in ("token_ids", "offsets"))
    assert wire.from_csr(ids, offsets, V).to_lists() == lists["sampling_mask"]


def test_a_row_with_nothing_to_draw_from_is_told(running):
    params = sampling(allowed_token_ids=[5, 6], bad_words=[[5], [6]])
    (choice,) = running.generate([7], sampling_params=params)["choices"]
    assert (choice["finish_reason"], choice["token_ids"], choice["sampling_mask"]) == ("error", [], [])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", PATH, 405), ("POST", "/nowhere", 404), ("GET", "/inference/v1", 404), ("DELETE", "/openapi.json", 405)],
)
def test_wrong_paths_and_methods_are_json_errors(running, method, path, status):
    response = running.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status


def test_another_model_is_not_found(running):
    error = running.generate([5], model="other", status=404)["error"]
    assert error["message"] == "The model `other` does not exist."
    assert error["type"] == "NotFoundError"


def test_raw_modes_are_those_of_the_engine():
    other = known_model(seed=3)
    engine = Engine(other, None, EngineConfig(logprobs_mode="raw_logprobs"))
    assert engine.config.return_sampling_mask is False
    with running_server(other, return_sampling_mask=False, logprobs_mode="raw_logprobs", is_warm=False) as running:
        (choice,) = running.generate([5], sampling_params={"temperature": 0, "logprobs": 1, "max_tokens": 1})["choices"]
        (entry,) = choice["logprobs"]["content"]
        logits = np.asarray(other.logits([5]), np.float64)
        assert entry["logprob"] == pytest.approx(logits.max() - np.log(np.exp(logits).sum()), abs=1e-5)
        assert choice["sampling_mask"] is None
        refused(
            running,
            {"token_ids": [5], "sampling_params": {"top_k": 3, "return_sampling_mask": True}},
            "requires logprobs_mode='processed_logprobs'",
        )
