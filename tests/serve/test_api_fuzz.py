"""Requests made up from the OpenAPI page: whatever comes, the answer is no 500, and JSON or a stream of it."""

import json

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from serving import refuse
from wordy import ENDPOINTS, body_of

NUM_EXAMPLES = 25
SETTINGS = hypothesis.settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
LEFT_OUT = {"/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/load_weights", "/abort_requests"}


def check_answer(response):
    kind = response.headers.get("content-type", [""])
    kind = kind[0] if isinstance(kind, list) else kind
    assert response.status_code < 500, response.text
    if kind.startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line, parse_constant=refuse) for line in lines]
        assert all("error" not in event for event in events)
    elif kind.startswith("application/json"):
        answer = json.loads(response.text, parse_constant=refuse)
        if response.status_code >= 400:
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["code"] == response.status_code


@pytest.fixture(scope="module")
def schema(wordy_server):
    return schemathesis.openapi.from_dict(wordy_server.client.get("/openapi.json").json())


def statuses_of(operation, mode, url):
    """Of the answers to made-up requests, all of which were checked."""
    statuses = set()
    endpoint = next((name for name, path in ENDPOINTS.items() if path == operation.path), None)

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    @SETTINGS
    def answer(case, data):
        body = case.body
        if endpoint is not None and isinstance(body, dict) and body and data.draw(st.booleans()):
            # One that is in order but for a few fields comes further than one of which all is made up.
            names = data.draw(st.lists(st.sampled_from(sorted(body)), max_size=2))
            case.body = body_of(endpoint) | {name: body[name] for name in names}
        response = case.call(base_url=url, timeout=60)
        check_answer(response)
        statuses.add(response.status_code)

    answer()
    return statuses


def test_made_up_requests(schema, wordy_server):
    statuses = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path not in LEFT_OUT:
            # What takes no body cannot be asked wrongly.
            takes_body = "requestBody" in schema.raw_schema["paths"][operation.path][operation.method]
            modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * takes_body
            found = [statuses_of(operation, mode, wordy_server.url) for mode in modes]
            statuses[operation.path] = set.union(*found)
    assert {"/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize"} <= set(statuses)
    for path in ENDPOINTS.values():
        assert {200, 400} <= statuses[path]
    wordy_server.wait_until_idle()


VALUES = [None, True, -1, 10**30, 1.5, "", "a\0", [], [-1], ["a"], {"a": 1}]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_with_every_kind_of_value(schema, wordy_server, endpoint):
    """Each field of a request that is else in order."""
    names = {"generate": "GenerateBody", "completions": "CompletionBody", "chat": "ChatBody"}
    schemas = schema.raw_schema["components"]["schemas"]
    fields = {**schemas[names[endpoint]]["properties"], **schemas["TokenSampling"]["properties"]}
    for field in fields:
        for value in VALUES:
            body = body_of(endpoint, **{field: value}) if field != "logprobs" else body_of(endpoint) | {field: value}
            response = wordy_server.client.post(ENDPOINTS[endpoint], json=body)
            check_answer(response)
    assert wordy_server.client.post(ENDPOINTS[endpoint], json=body_of(endpoint)).status_code == 200
