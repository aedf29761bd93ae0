"""Whether a server loses, mixes up or keeps anything: thousands of requests, each compared with its answer alone.

    python benchmarks/serve_soak.py --requests 20000

64 clients of a server process send requests of mixed lengths and settings; half are streamed, and a quarter of the
clients hang up before their answer is whole. Each whole answer must hold the ids and the supports that the offline API
gives for the same request when it is alone, and its log-probabilities within 1e-4. In the end nothing runs or waits,
and the server's memory is where it was.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from server_process import MASKED, ServerProcess, server_process, tiny_model

from jaxmask import SamplingParams
from serve import LLM

KINDS = ("whole", "stream", "whole", "stream", "whole", "stream", "leave whole", "leave stream")
PATH = "/inference/v1/generate"
LOGPROB_TOLERANCE = 1e-4
NUM_SLOTS = 32
Body = dict[str, Any]


def body_of(number: int, vocab_size: int) -> Body:
    """Request `number`: its own prompt, seed and settings."""
    random = np.random.default_rng(number)
    sampling = {
        "temperature": float(random.choice([0.7, 1.0, 1.4])),
        "top_k": int(random.integers(2, 17)),
        "top_p": float(random.choice([0.8, 0.95, 1.0])),
        "min_p": float(random.choice([0.0, 0.02])),
        "max_tokens": int(random.integers(1, 24)),
        "logprobs": 0,
        "seed": number,
        "n": int(random.choice([1, 1, 1, 2])),
    }
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5} if number % 5 == 0 else {}
    prompt = random.integers(0, vocab_size, random.integers(1, 60)).tolist()
    return {"token_ids": prompt, "sampling_params": sampling | penalties}


def alone(llm: LLM, body: Body) -> dict[int, Body]:
    """What the offline API answers, by the index of each choice."""
    (output,) = llm.generate([body["token_ids"]], SamplingParams(**body["sampling_params"]), use_tqdm=False)
    return {
        one.index: {
            "token_ids": one.token_ids,
            "sampling_mask": one.sampling_mask.token_ids,
            "finish_reason": one.finish_reason,
            "logprobs": [entries[token].logprob for token, entries in zip(one.token_ids, one.logprobs, strict=True)],
        }
        for one in output.outputs
    }


def joined(objects: list[Body]) -> dict[int, Body]:
    """What the server answered, whole or in pieces, in the same form."""
    found: dict[int, Body] = {}
    for choice in (choice for each in objects for choice in each["choices"]):
        one = found.setdefault(choice["index"], {"token_ids": [], "sampling_mask": [], "logprobs": []})
        one["token_ids"] += choice["token_ids"]
        one["sampling_mask"] += choice["sampling_mask"]
        one["logprobs"] += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        one["finish_reason"] = choice["finish_reason"]
    return found


def difference(found: dict[int, Body], expected: dict[int, Body]) -> str | None:
    """What differs between two answers; None where they are the same."""
    if found.keys() != expected.keys():
        return f"choices {sorted(found)} for {sorted(expected)}"
    for index, one in expected.items():
        for field in ("token_ids", "sampling_mask", "finish_reason"):
            if found[index][field] != one[field]:
                return f"{field} {found[index][field]} for {one[field]}"
        if not np.allclose(found[index]["logprobs"], one["logprobs"], rtol=0, atol=LOGPROB_TOLERANCE):
            return f"logprobs {found[index]['logprobs']} for {one['logprobs']}"
    return None


async def ask(client: httpx.AsyncClient, kind: str, body: Body) -> list[Body] | None:
    """The objects of an answer; None where the client hung up before it was whole."""
    if kind == "whole":
        response = await client.post(PATH, json=body)
        response.raise_for_status()
        return [response.json()]
    if kind == "leave whole":
        try:
            async with asyncio.timeout(0.02):
                return [(await client.post(PATH, json=body)).json()]
        except TimeoutError:
            return None
    objects = []
    async with client.stream("POST", PATH, json=body | {"stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return objects
            if line:
                objects.append(json.loads(line.removeprefix("data: ")))
            if line and kind == "leave stream":
                return None
    raise RuntimeError(f"a stream ended without [DONE]: {objects[-1:]}")


async def ask_all(
    url: str, bodies: list[Body], num_requests: int, num_clients: int, check: Callable[[int, list[Body]], None]
) -> Counter[str]:
    """Sends so many requests, and calls `check` with the number of each and its whole answer; counts how they went."""
    numbers, counts = iter(range(num_requests)), Counter[str]()
    limits = httpx.Limits(max_connections=None)

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            answer = await ask(client, KINDS[number % len(KINDS)], bodies[number % len(bodies)])
            counts["left" if answer is None else "answered"] += 1
            if answer is not None:
                check(number % len(bodies), answer)

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(*(work(client) for _ in range(num_clients)))
    return counts


def gauges(url: str) -> dict[str, float]:
    """The server's metrics that have no label."""
    lines = [line.split() for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {words[0].split("{")[0]: float(words[-1]) for words in lines}


def is_idle(url: str, seconds: float = 10.0) -> bool:
    """Whether nothing runs or waits soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = gauges(url)
        if found["jaxmask:num_requests_running"] == found["jaxmask:num_requests_waiting"] == 0:
            return True
        time.sleep(0.05)
    return False


def soak(server: ServerProcess, llm: LLM, num_requests: int, num_distinct: int, num_clients: int) -> Body:
    """Sends everything, and says what was found."""
    vocab_size = llm.engine.limits.vocab_size
    bodies = [body_of(number, vocab_size) for number in range(num_distinct)]
    expected = [alone(llm, body) for body in bodies]
    wrong: list[str] = []

    def check(number: int, objects: list[Body]) -> None:
        if (found := difference(joined(objects), expected[number])) is not None:
            wrong.append(f"request {number}: {found}")

    asyncio.run(ask_all(server.url, bodies, num_distinct, num_clients, check))
    before, started = server.rss(), time.monotonic()
    counts = asyncio.run(ask_all(server.url, bodies, num_requests, num_clients, check))
    seconds = time.monotonic() - started
    return {
        "requests": num_requests,
        "answered": counts["answered"],
        "left": counts["left"],
        "wrong": wrong,
        "is_idle": is_idle(server.url),
        "requests_per_second": num_requests / seconds,
        "grown_mib": (server.rss() - before) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--distinct", type=int, default=250)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(Path(folder))
        settings = ("--max-num-seqs", str(NUM_SLOTS), "--min-num-seqs", str(NUM_SLOTS), "--no-access-log")
        # One shape, so that nothing is compiled between its answers; a pair of samples is the most it is asked for.
        shape = {"max_num_seqs": 2, "min_num_seqs": 2, "min_model_len": 128}
        llm = LLM(folder, return_sampling_mask=True, logprobs_mode="processed_logprobs", **shape)
        with server_process(folder, *MASKED, *settings) as server:
            found = soak(server, llm, options.requests, options.distinct, options.clients)
            code = server.terminate()
    for name, value in found.items():
        print(f"{name:20} {value if not isinstance(value, list) else value[:3] or 'none'}")
    print(f"exit code            {code}")


if __name__ == "__main__":
    main()
