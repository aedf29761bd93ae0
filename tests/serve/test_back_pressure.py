"""Queues that are full, clients that leave, time that runs out, and turns that are fair: over HTTP."""

import concurrent.futures
import contextlib
import time

import httpx
import pytest
from engine_models import PROMPTS, known_model
from serving import SAMPLING, running_server

from serve.api.service import ServerConfig

PATH = "/inference/v1/generate"
# Far more tokens than are drawn while a test looks.
ENDLESS = {"top_k": 2, "max_tokens": 100_000, "ignore_eos": True, "seed": 1}
MOST = 4 + 6


@pytest.fixture(scope="module")
def running():
    model = known_model(max_length=2**17)
    config = ServerConfig(model_names=("known",), request_timeout=60.0)
    with running_server(model, max_waiting=6, is_warm=False, config=config, min_model_len=2**17) as running:
        running.generate([5], sampling_params={"top_k": 2, "max_tokens": 3})
        yield running
        running.wait_until_idle()


@contextlib.contextmanager
def clients(running, *bodies):
    """Sends bodies, each by a client of its own, and gives the futures of their responses."""
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        yield [pool.submit(httpx.post, running.url + PATH, json=body, timeout=60) for body in bodies]


def until(holds, seconds=10.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def body_of(prompt, **fields):
    return {"token_ids": prompt, "sampling_params": SAMPLING | {"logprobs": None}, **fields}


@contextlib.contextmanager
def held(running):
    """Nothing runs meanwhile; requests are taken and wait."""
    running.on_loop(running.service.engine.pause("keep"))
    try:
        yield
    finally:
        running.on_loop(running.service.engine.resume())


def test_a_full_queue_is_429_and_those_that_wait_are_answered(running):
    body = body_of(PROMPTS[1])
    with clients(running, *[body] * MOST) as futures:
        with held(running):
            until(lambda: running.service.engine.num_open == MOST)
            for fields in ({}, {"stream": True}):
                response = running.client.post(PATH, json=body | fields)
                assert response.status_code == 429
                assert 1 <= int(response.headers["retry-after"]) <= 60
                assert response.json()["error"]["type"] == "RateLimitError"
            # What can never fit is no matter of trying again.
            many = running.client.post(PATH, json=body_of([5]) | {"sampling_params": {"top_k": 2, "n": MOST + 1}})
            assert many.status_code == 400
        answers = [future.result().json()["choices"] for future in futures]
    assert all(answer == answers[0] for answer in answers)
    assert running.client.post(PATH, json=body).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_who_hangs_up_frees_the_slot(running, is_streamed):
    """P64."""
    engine = running.service.engine.engine
    body = {"token_ids": [5], "sampling_params": ENDLESS | {"n": 3}, "stream": is_streamed}
    with httpx.Client(base_url=running.url) as client:
        if is_streamed:
            with client.stream("POST", PATH, json=body) as response:
                next(response.iter_lines())
                until(lambda: engine.num_running == 3)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(PATH, json=body, timeout=0.5)
    running.wait_until_idle(2.0)
    assert running.generate([5], sampling_params={"top_k": 2})["choices"]


def test_who_hangs_up_while_waiting_leaves_the_queue(running):
    with held(running), pytest.raises(httpx.ReadTimeout):
        httpx.post(running.url + PATH, json=body_of([5]), timeout=0.3)
    until(lambda: running.service.engine.num_open == 0, 2.0)


def test_time_that_runs_out_gives_what_there_is(running):
    body = {"token_ids": [5], "sampling_params": ENDLESS, "timeout": 0.4}
    (choice,) = running.client.post(PATH, json=body).json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) == len(choice["sampling_mask"]) < 100_000
    events = running.events(PATH, body)
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) > 0


def test_time_that_runs_out_before_the_first_token_is_503(running):
    with held(running):
        response = running.client.post(PATH, json=body_of([5], timeout=0.05))
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
    for timeout in (0, -1.0, 1e400):
        content = f'{{"token_ids": [5], "sampling_params": {{"top_k": 2}}, "timeout": {timeout}}}'.replace(
            "inf", "Infinity"
        )
        response = running.client.post(PATH, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "timeout"


def test_requests_are_aborted_by_name_and_answered(running):
    body = {"token_ids": [5], "sampling_params": ENDLESS, "request_id": "mine"}
    with clients(running, body) as (future,):
        until(lambda: running.service.engine.engine.num_running == 1)
        again = running.client.post(PATH, json=body)
        assert again.status_code == 400
        assert "generate-tokens-mine" in again.json()["error"]["message"]
        names = {"request_ids": ["mine", "nobody"]}
        assert running.client.post("/inference/v1/abort_requests", json=names).json()["aborted"] == 1
        (choice,) = future.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert running.client.post("/inference/v1/abort_requests", json=names).json()["aborted"] == 0


def test_one_request_of_many_samples_does_not_lock_out_others(running):
    """Of a request that wants all slots again and again, and one that comes later and wants one."""
    many = {"token_ids": [5], "sampling_params": {"top_k": 2, "n": 8, "max_tokens": 1000, "ignore_eos": True}}
    with clients(running, many) as (future,):
        until(lambda: running.service.engine.engine.num_running == 4)
        (choice,) = running.generate([7], sampling_params={"top_k": 2, "max_tokens": 2, "ignore_eos": True})["choices"]
        assert len(choice["token_ids"]) == 2
        assert not future.done()
        assert len(future.result().json()["choices"]) == 8
