"""`python -m serve` as a process of its own: equality under load, and its end under load."""

import asyncio
import json
import re
import signal
import socket
from collections import Counter
from pathlib import Path

import httpx
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SLOTS = ("--max-num-seqs", "8", "--min-num-seqs", "8", "--min-model-len", "128", "--no-access-log")
LONG = {"token_ids": [3, 4, 5], "sampling_params": {"top_k": 5, "max_tokens": 120, "ignore_eos": True}}
PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def scripts():
    """Scripts find each other in their own folder."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(BENCHMARKS))
    import serve_soak
    import server_process

    yield server_process, serve_soak
    patch.undo()


@pytest.fixture(scope="module")
def folder(scripts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    processes, _ = scripts
    processes.tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return ("--compilation-cache-dir", str(tmp_path_factory.mktemp("programs")))


async def outcome(client, is_streamed):
    """How a long request ends for its client."""
    try:
        if not is_streamed:
            response = await client.post(PATH, json=LONG)
            return told(response.status_code, response.json())
        async with client.stream("POST", PATH, json=LONG | {"stream": True}) as response:
            if response.status_code != 200:
                return told(response.status_code, json.loads(await response.aread()))
            lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            return told(200, json.loads(lines[-2].removeprefix("data: ")))
    except httpx.ConnectError:
        return "refused"


def told(status, body):
    """The end of an answer in a word."""
    if status == 200:
        return body["choices"][0]["finish_reason"]
    assert status == 503, body
    assert body["error"]["message"] == "The server is shutting down."
    return "told"


async def end_under_load(server, num_clients):
    """Clients that ask until they are refused; after some answers comes SIGTERM."""
    outcomes = Counter()

    async def ask(client, number):
        while (how := await outcome(client, number % 2 == 0)) in ("length", "abort"):
            outcomes[how] += 1
            if outcomes.total() == 12:
                server.process.send_signal(signal.SIGTERM)
        outcomes[how] += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(ask(client, number) for number in range(num_clients)))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("drain_timeout", [60, 0.01])
def test_sigterm_under_load_answers_or_tells_everyone(scripts, folder, cache, drain_timeout):
    processes, _ = scripts
    options = (*processes.MASKED, *SLOTS, *cache, "--drain-timeout", str(drain_timeout))
    with processes.server_process(folder, *options) as server:
        outcomes = asyncio.run(end_under_load(server, 32))
        assert server.ended() == 0
    # Every client was told in the end; until then each request was answered, whole or with what there was.
    assert outcomes["told"] + outcomes["refused"] == 32
    assert outcomes["length"] >= 12
    assert (outcomes["abort"] > 0) == (drain_timeout < 1)
    assert "Traceback" not in server.text
    assert not re.search(r"ERROR|WARNING", server.text), server.text
    assert "all completions have ended" in server.text


@pytest.mark.slow
def test_clients_that_do_nothing_do_not_keep_the_server(scripts, folder, cache):
    """One reads nothing of a long stream, one never ends its body: both are hung up on, without a traceback."""
    processes, _ = scripts
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sampling = LONG["sampling_params"] | {"top_k": 96, "n": 64}
    body = json.dumps(LONG | {"sampling_params": sampling, "stream": True})
    with processes.server_process(folder, *processes.MASKED, *SLOTS, *cache) as server, socket.socket() as deaf:
        address = (httpx.URL(server.url).host, httpx.URL(server.url).port)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(address)
        deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        with socket.create_connection(address) as slow:
            slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            # By then the server has read what is above.
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert server.terminate() == 0
    assert not re.search(r"Traceback|ERROR|WARNING", server.text), server.text


@pytest.mark.slow
def test_load_changes_no_answer(scripts, folder, cache):
    """64 clients, mixed lengths, half streaming, a quarter hanging up: what is whole is what the request gets alone."""
    processes, serve_soak = scripts
    from serve import LLM

    shape = {"max_num_seqs": 2, "min_num_seqs": 2, "min_model_len": 128}
    llm = LLM(folder, return_sampling_mask=True, logprobs_mode="processed_logprobs", **shape)
    with processes.server_process(folder, *processes.MASKED, *SLOTS, *cache) as server:
        found = serve_soak.soak(server, llm, num_requests=320, num_distinct=40, num_clients=64)
        assert server.terminate() == 0
    assert found["wrong"] == []
    assert found["answered"] >= 240
    assert found["answered"] + found["left"] == 320
    assert found["left"] > 20
    assert found["is_idle"]
    assert found["grown_mib"] < 50
    assert "Traceback" not in server.text


def test_what_cannot_be_served_is_one_line(scripts, folder):
    processes, _ = scripts
    with pytest.raises(RuntimeError) as error, processes.server_process(folder, "--return-sampling-mask"):
        pass
    (line,) = [line for line in str(error.value).splitlines() if line.startswith("error: ")]
    assert "requires logprobs_mode='processed_logprobs'" in line
    assert "Traceback" not in str(error.value)
    assert "ended with 2" in str(error.value)
