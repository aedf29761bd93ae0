"""The pieces of the benchmark of the server, on a server of a model that costs nothing."""

import argparse
import sys
from pathlib import Path

import pytest
from engine_models import MODEL, V
from serving import running_server

from serve import LLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ARGUMENTS = argparse.Namespace(quick=True, requests=2)
MASKED = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}


@pytest.fixture(scope="module", autouse=True)
def benchmarks():
    # Last, so that no script hides a module of the tests.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
        yield


@pytest.fixture(scope="module")
def running():
    with running_server(MODEL, None, is_warm=False) as running:
        yield running


def test_requests_are_mixed_and_always_the_same():
    import http_load

    text = list(range(3, V)) * 4
    found = http_load.shapes(text, 40, longest_prompt=20, most_tokens=16, seed=3)
    assert found == http_load.shapes(text, 40, longest_prompt=20, most_tokens=16, seed=3)
    assert found != http_load.shapes(text, 40, longest_prompt=20, most_tokens=16, seed=4)
    assert {shape.is_streamed for shape in found} == {True, False}
    assert sum(shape.is_streamed for shape in found) == 20
    assert 8 <= min(len(shape.token_ids) for shape in found) < max(len(shape.token_ids) for shape in found) <= 20
    assert 4 <= min(shape.num_tokens for shape in found) < max(shape.num_tokens for shape in found) <= 16
    assert len({shape.seed for shape in found}) == 40


def test_a_load_counts_tokens_and_times(running):
    import http_load

    requests = http_load.shapes(list(range(3, V)), 12, longest_prompt=16, most_tokens=12)
    load = http_load.run(http_load.Target(running.url), requests, 4)
    expected = sum(shape.num_tokens for shape in requests)
    assert sum(answer.num_tokens for answer in load.answers) == expected
    assert load.tokens_per_second == pytest.approx(expected / load.seconds)
    streamed = [answer for answer in load.answers if answer.first is not None]
    assert len(streamed) == len(load.first_ms()) == 6
    for answer in streamed:
        assert answer.begun < answer.first <= answer.ended
        # Events after the first, each cut into its tokens.
        assert sum(answer.gaps) <= answer.ended - answer.first + 1e-6
        assert len(answer.gaps) < answer.num_tokens
    running.wait_until_idle()


def test_masks_are_asked_for_or_not(running):
    import http_load

    shape = http_load.Shape((3, 4, 5), 4, 0, False)
    for wanted in (True, False):
        body = http_load.Target(running.url, returns_mask=wanted).body(shape)
        choice = running.client.post("/inference/v1/generate", json=body).json()["choices"][0]
        assert (choice["sampling_mask"] is not None) == wanted


def test_a_refusal_ends_the_benchmark(running):
    import http_load

    with pytest.raises(RuntimeError, match="out-of-vocab"):
        http_load.run(http_load.Target(running.url), [http_load.Shape((V,), 2, 0, True)], 1)


def test_the_table(running, capsys):
    import serve_http

    requests = serve_http.level(2, ARGUMENTS, list(range(3, V)))
    serve_http.wait_for(running.url)
    targets = {"on": serve_http.Target(running.url), "off": serve_http.Target(running.url, False)}
    loads = serve_http.in_turns(targets, requests, 2, 2)
    assert [len(some) for some in loads.values()] == [2, 2]
    serve_http.report(2, loads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[2].strip() for line in lines[:2]] == ["on", "off"]
    ratio = serve_http.speed_of(loads["on"]) / serve_http.speed_of(loads["off"])
    assert f"on / off: {ratio:.3f}x" in lines[2]
    assert all(line.count("|") == 7 for line in lines)


def test_the_loop_over_the_offline_api():
    import serve_http

    llm = LLM(MODEL, max_num_seqs=4, min_num_seqs=4, min_model_len=64, steps_per_chunk=8, **MASKED)
    assert serve_http.loop(llm, serve_http.level(2, ARGUMENTS, list(range(3, V))), 2) > 0
