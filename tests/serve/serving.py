"""A server on a free port of this machine, in a thread of the test's process, and clients for it."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time

import httpx
import uvicorn
from engine_models import MODEL, SETTINGS, SHAPE, WORDS, warm

from serve import server
from serve.api.app import create_app
from serve.api.service import ServerConfig, Service
from serve.async_engine import AsyncEngine
from serve.config import EngineConfig
from serve.engine import Engine

NAME = "known"
SAMPLING = {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.01, "max_tokens": 9, "logprobs": 3, "seed": 5}


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that answers, and a client of it."""

    url: str
    service: Service
    client: httpx.Client
    server: server.Server

    def generate(self, token_ids, *, status=200, **fields):
        """The body that /inference/v1/generate answers; settings as in SAMPLING unless others are given."""
        body = {"token_ids": token_ids, "sampling_params": SAMPLING, **fields}
        response = self.client.post("/inference/v1/generate", json=body)
        assert response.status_code == status, response.text
        return response.json()

    def events(self, path, body):
        """The objects of a stream, without its end, which must be there."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line, parse_constant=refuse) for line in lines[:-1]]

    def on_loop(self, work):
        """What a coroutine returns on the server's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.service.engine._loop).result(30)

    def wait_until_idle(self, seconds=10.0):
        """Returns once nothing runs or waits."""
        end = time.monotonic() + seconds
        while self.service.engine.num_open or self.service.engine.engine.num_running:
            assert time.monotonic() < end, "requests are still open"
            time.sleep(0.01)


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


@contextlib.contextmanager
def running_server(
    model=MODEL, tokenizer=WORDS, *, config=None, max_waiting=1024, defaults=None, is_warm=True, **settings
):
    """A running server of an engine with these settings, on top of SETTINGS and SHAPE."""
    engine = Engine(model, tokenizer, EngineConfig(**{**SETTINGS, **SHAPE, **settings}))
    if is_warm:
        warm(engine)
    service = Service(
        AsyncEngine(engine, max_waiting=max_waiting), config or ServerConfig(model_names=(NAME,)), defaults or {}
    )
    with server.listen("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        config = uvicorn.Config(create_app(service), log_level="warning", timeout_graceful_shutdown=5)
        running = server.Server(config, service)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            with httpx.Client(base_url=url, timeout=60) as client:
                yield Running(url, service, client, running)
        finally:
            running.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not stop"
