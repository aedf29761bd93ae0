import threading

import numpy as np
import pytest
from engine_models import PROMPTS, Programs
from prometheus_client.parser import text_string_to_metric_families
from serving import NAME, SAMPLING, running_server

from serve.api.histogram import Histogram

GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def running():
    with running_server(is_warm=False) as running:
        # All requests below are like this one, so that one set of programs answers them.
        running.generate([3], sampling_params={**SAMPLING, "max_tokens": 1})
        yield running


def values(running):
    """Of every sample by its name, without the name's prefix and the label of the model."""
    response = running.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("jaxmask:"):
                assert labels.pop("model_name") == NAME
            found[sample.name.removeprefix("jaxmask:"), *labels.values()] = sample.value
    return found


def test_what_was_delivered_is_counted_once(running):
    before = values(running)
    with Programs() as programs:
        (choice,) = running.generate(PROMPTS[2])["choices"]
        events = running.events(GENERATE, {"token_ids": PROMPTS[3], "sampling_params": {**SAMPLING, "n": 2}})
    masks = choice["sampling_mask"] + [
        ids for event in events for delta in event["choices"] for ids in delta["sampling_mask"]
    ]
    after = values(running)
    added = {name: value - before.get(name, 0) for name, value in after.items()}
    assert len(masks) == 27
    assert added["generation_tokens_total",] == 27
    assert added["prompt_tokens_total",] == len(PROMPTS[2]) + len(PROMPTS[3])
    assert added["sampling_mask_ids_total",] == sum(map(len, masks))
    assert added["sampling_mask_support_size_count",] == 27
    assert added["sampling_mask_support_size_bucket", "4"] == sum(len(ids) <= 4 for ids in masks)
    assert added["request_success_total", "length"] == 3
    assert added["request_params_n_sum",] == 3
    assert added["request_generation_tokens_sum",] == 27
    assert added["inter_token_latency_seconds_count",] == 24
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert added[f"{name}_seconds_count",] == 2
    assert added["http_responses_total",] == 3
    assert added["compiled_programs_total",] == programs.count
    assert after["weight_info", "0"] == after["gate_info", "open"] == 1
    assert after["num_requests_running",] == after["num_requests_waiting",] == after["kv_cache_usage_perc",] == 0
    assert after["process_resident_memory_bytes",] > 0


def test_refusals_are_counted_by_their_kind(running):
    before = values(running)
    running.generate([], status=400)
    running.generate([3], model="another", status=404)
    added = {name: value - before.get(name, 0) for name, value in values(running).items()}
    assert added["requests_refused_total", "BadRequestError"] == 1
    assert added["requests_refused_total", "NotFoundError"] == 1
    assert added["request_success_total", "length"] == 0


def test_what_runs_and_waits_is_shown_while_others_read_it(running):
    """Four slots, six completions; whoever reads numbers meanwhile disturbs nobody."""
    slow = {**SAMPLING, "max_tokens": 50, "n": 6, "ignore_eos": True}
    results, seen = [], []
    thread = threading.Thread(target=lambda: results.append(running.generate([3], sampling_params=slow)))
    thread.start()
    while thread.is_alive():
        now = values(running)
        seen.append((now["num_requests_running",], now["num_requests_waiting",], now["kv_cache_usage_perc",]))
    thread.join()
    assert [len(choice["token_ids"]) for choice in results[0]["choices"]] == [50] * 6
    assert all(num_running <= 4 and num_waiting <= 6 and 0 <= share <= 1 for num_running, num_waiting, share in seen)


def test_small_endpoints(running):
    assert running.client.get("/health").content == b""
    for response in (running.client.get("/ping"), running.client.post("/ping"), running.client.get("/health")):
        assert response.status_code == 200
        assert response.headers["X-Weight-Version"] == "0"
    assert running.client.get("/version").json() == {"version": "0.1.0"}
    assert running.client.get("/load").json() == {"server_load": 0}
    assert running.client.get("/no/such/page").headers["X-Weight-Version"] == "0"
    response = running.client.delete("/health")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "MethodNotAllowedError")


def test_an_endpoint_that_fails_says_no_more_than_that(running, monkeypatch):
    def fail():
        raise RuntimeError("a secret")

    monkeypatch.setattr(type(running.service.engine), "num_open", property(lambda _: fail()))
    response = running.client.get("/load")
    assert response.status_code == 500
    assert response.headers["X-Weight-Version"] == "0"
    assert response.json() == {
        "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    }


def test_text_that_utf8_does_not_have_is_no_failure(running):
    body = b'{"token_ids": [3], "sampling_params": {}, "model": "\\ud800", "\\udfff": 1}'
    response = running.client.post(GENERATE, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400


def test_a_server_whose_engine_has_died_is_not_healthy():
    with running_server(is_warm=False) as running:

        def die():
            raise SystemExit("the thread ends")

        running.service.engine.engine.step = die
        running.generate([3], status=500)
        response = running.client.get("/health")
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        running.generate([3], status=503)
        assert running.client.get("/metrics").status_code == 200


def test_histogram_counts_values_by_their_bounds():
    histogram = Histogram((1, 2.5))
    histogram.add(1)
    histogram.add(2, times=3)
    histogram.add_all(np.array([0, 7, 2]))
    assert histogram.buckets == [("1", 2.0), ("2.5", 6.0), ("+Inf", 7.0)]
    assert histogram.total == 16.0
