"""Clients of a server: each sends its next request once its last one is answered. Bare sockets, so that a client costs
little beside the server on the same machine."""

import asyncio
import collections
import dataclasses
import itertools
import json
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np

# Seconds for one answer; far above any, so that a server that hangs is noticed.
PATIENCE = 900


@dataclasses.dataclass(frozen=True)
class Shape:
    """A request: a prompt, and how it is to go on."""

    token_ids: tuple[int, ...]
    num_tokens: int
    seed: int
    is_streamed: bool


@dataclasses.dataclass(frozen=True)
class Target:
    """Where requests go: vLLM's token endpoint, or OpenAI's completions where `model` is given."""

    url: str
    returns_mask: bool | None = None
    model: str | None = None

    @property
    def path(self) -> str:
        return "/inference/v1/generate" if self.model is None else "/v1/completions"

    def body(self, shape: Shape) -> dict[str, Any]:
        # Rows never end early: every engine has the same number of tokens to draw.
        sampling = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": shape.seed, "ignore_eos": True}
        sampling |= {"max_tokens": shape.num_tokens, "logprobs": 0}
        sampling |= {} if self.returns_mask is None else {"return_sampling_mask": self.returns_mask}
        ids, stream = list(shape.token_ids), {"stream": shape.is_streamed}
        if self.model is None:
            return {"token_ids": ids, "sampling_params": sampling} | stream
        return {"prompt": ids, "model": self.model} | sampling | stream


@dataclasses.dataclass(frozen=True)
class Answer:
    """When the tokens of a request came; seconds of a clock."""

    begun: float
    ended: float
    num_tokens: int
    first: float | None = None
    gaps: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Load:
    """What a number of clients got."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.seconds

    def first_ms(self) -> list[float]:
        """To the first token, of streamed requests."""
        return [1e3 * (answer.first - answer.begun) for answer in self.answers if answer.first is not None]

    def gaps_ms(self) -> list[float]:
        """Between tokens of streamed requests; those of one event share the time since the last one."""
        return [1e3 * gap for answer in self.answers for gap in answer.gaps]


def shapes(text: Sequence[int], num: int, *, longest_prompt: int, most_tokens: int, seed: int = 0) -> list[Shape]:
    """Mixed requests, every other one streamed; prompts are cut from the text."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(num):
        length = int(rng.integers(min(8, longest_prompt), longest_prompt + 1))
        start = int(rng.integers(0, len(text) - length + 1))
        num_tokens = int(rng.integers(max(most_tokens // 4, 1), most_tokens + 1))
        found.append(Shape(tuple(text[start : start + length]), num_tokens, 1000 * seed + number, number % 2 == 0))
    return found


def percentiles(values: Sequence[float]) -> str:
    """Median and 99th percentile of milliseconds."""
    return " / ".join(f"{value:.0f}" for value in np.percentile(values, [50, 99])) if values else "-"


def run(target: Target, requests: Sequence[Shape], num_clients: int) -> Load:
    """All requests, by so many clients."""
    return asyncio.run(_closed_loop(target, requests, num_clients))


async def _closed_loop(target: Target, requests: Sequence[Shape], num_clients: int) -> Load:
    waiting = collections.deque(requests)
    begun = time.perf_counter()
    clients = (_client(target, waiting) for _ in range(num_clients))
    answers = tuple(itertools.chain.from_iterable(await asyncio.gather(*clients)))
    return Load(time.perf_counter() - begun, answers)


async def _client(target: Target, waiting: collections.deque[Shape]) -> list[Answer]:
    address = urllib.parse.urlsplit(target.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**24)
    answers = []
    try:
        while waiting:
            shape = waiting.popleft()
            async with asyncio.timeout(PATIENCE):
                answers.append(await _ask(reader, writer, target, shape, address.netloc))
    finally:
        writer.close()
    return answers


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target, shape: Shape, host: str
) -> Answer:
    content = json.dumps(target.body(shape)).encode()
    head = f"POST {target.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    begun = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    counts, times = [], []
    async for event in _events(reader, shape.is_streamed):
        if num := _num_tokens(event):
            counts.append(num)
            times.append(time.perf_counter())
    ended = time.perf_counter()
    if sum(counts) != shape.num_tokens:
        raise RuntimeError(f"{sum(counts)} tokens came of {shape.num_tokens}")
    if not shape.is_streamed:
        return Answer(begun, ended, sum(counts))
    spans = zip(itertools.pairwise(times), counts[1:], strict=True)
    gaps = tuple(gap for (before, after), num in spans for gap in [(after - before) / num] * num)
    return Answer(begun, ended, sum(counts), times[0], gaps)


async def _events(reader: asyncio.StreamReader, is_streamed: bool) -> AsyncIterator[dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    if not head.startswith("http/1.1 200"):
        raise RuntimeError(f"the server refuses: {head} {b''.join([piece async for piece in _pieces(reader, head)])!r}")
    rest = b""
    async for piece in _pieces(reader, head):
        rest += piece
        if is_streamed:
            *whole, rest = rest.split(b"\n\n")
            for event in _parsed(whole):
                yield event
    if not is_streamed:
        yield json.loads(rest)


async def _pieces(reader: asyncio.StreamReader, head: str) -> AsyncIterator[bytes]:
    if "transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return
    length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
    yield await reader.readexactly(int(length.partition(":")[2]))


def _parsed(events: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for event in events:
        text = event.removeprefix(b"data: ")
        if text != b"[DONE]":
            yield json.loads(text)


def _num_tokens(event: dict[str, Any]) -> int:
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    return sum(
        len(choice["token_ids"] if choice.get("token_ids") is not None else choice["logprobs"]["tokens"])
        for choice in event["choices"]
    )
