import contextlib
import json
import threading
import time

import jax
import numpy as np
import pytest
from engine_models import SETTINGS, SHAPE, Programs
from serving import NAME, SAMPLING, running_server
from tiny_weights import CONFIG, damaged, decoder, edited, with_number

import models
from jaxmask import SamplingParams
from models.orbax_weights import save_orbax
from serve.api.control import PATHS, _named
from serve.api.service import ServerConfig
from serve.config import EngineConfig
from serve.engine import Engine
from serve.weight_files import Places

GENERATE = "/inference/v1/generate"
RL = ServerConfig(model_names=(NAME,), enable_rl_endpoints=True)
PROMPT = [5, 6, 7, 8, 9]
LONG = {**SAMPLING, "max_tokens": 50}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights 0 and 1, and folders that must be refused."""
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        models.save(decoder(seed), folder / str(seed))
    save_orbax(decoder(1), folder / "orbax")
    for value in ("nan", "inf"):
        models.save(with_number(decoder(1), float(value)), folder / value)
    for name in ("damaged", "epsilon", "no-weights", "no-json"):
        models.save(decoder(1), folder / name)
    damaged(folder / "damaged")
    edited(folder / "epsilon", rms_norm_eps=0.01)
    (folder / "no-weights" / "model.safetensors").unlink()
    (folder / "no-json" / "config.json").write_text("{")
    models.save(decoder(1, mlp_width=32), folder / "wider")
    models.save(decoder(1, num_layers=2), folder / "deeper")
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text("{}")
    (folder / "orbax-damaged").mkdir()
    (folder / "orbax-damaged" / "decoder.json").write_bytes((folder / "orbax" / "decoder.json").read_bytes())
    (folder / "empty").mkdir()
    (folder / "text").write_text("no model")
    return folder


@pytest.fixture(scope="module")
def running(folders):
    model = models.load(folders / "0")[0]
    with running_server(model, None, config=RL, is_warm=False, enable_prefix_caching=True) as running:
        del model
        # The first two requests compile what all further ones need.
        for token_id in (3, 4):
            running.generate([token_id, *PROMPT], sampling_params=LONG)
        yield running


@pytest.fixture(scope="module")
def expected():
    """What a fresh engine answers with weights 0 and with weights 1."""

    def answer(seed):
        engine = Engine(decoder(seed), None, EngineConfig(**SETTINGS, **SHAPE))
        engine.add_request("a", PROMPT, SamplingParams(**LONG))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        (completion,) = outputs[0].outputs
        return completion.token_ids, completion.sampling_mask.token_ids

    return [answer(0), answer(1)]


@pytest.fixture(autouse=True)
def weights_0(running, folders):
    """Each test begins awake, open, with weights 0, which are called "0"."""
    post(running, "/wake_up", status=(200, 409))
    post(running, "/update_weights", {"path": str(folders / "0"), "weight_version": "0"})
    post(running, "/wake_up")
    post(running, "/resume")


def post(running, path, body=None, *, status=200):
    response = running.client.post(path, json=body)
    assert response.status_code in (status if isinstance(status, tuple) else (status,)), response.text
    return response.json()


def get(running, path):
    return running.client.get(path).json()


def answer(running, **fields):
    (choice,) = running.generate(PROMPT, sampling_params=LONG, **fields)["choices"]
    return choice


def assert_answers(running, expected, version):
    choice = answer(running)
    assert (choice["token_ids"], choice["sampling_mask"]) == expected
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 50}]


@contextlib.contextmanager
def stopping_after_tokens(engine):
    """The engine takes no step after the first tokens until the server is paused."""
    step, seen = engine.engine.step, []

    def step_or_wait():
        end = time.monotonic() + 30
        while seen and engine.gate.state == "open":
            assert time.monotonic() < end
            time.sleep(0.001)
        outputs = step()
        seen.extend(outputs)
        return outputs

    engine.engine.step = step_or_wait
    try:
        yield
    finally:
        del engine.engine.step


class Held:
    """A streamed request that a pause keeps after its first tokens."""

    def __init__(self, running):
        self._running, self._has_begun = running, threading.Event()
        self.tokens, self.spans, self.reason = [], [], None
        self._thread = threading.Thread(target=self._read)
        with stopping_after_tokens(running.service.engine):
            self._thread.start()
            assert self._has_begun.wait(30)
            post(running, "/pause?mode=keep")

    def _read(self):
        body = {"token_ids": PROMPT, "sampling_params": LONG, "stream": True}
        with self._running.client.stream("POST", GENERATE, json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._take(line)
                    self._has_begun.set()

    def _take(self, line):
        for choice in json.loads(line[6:])["choices"]:
            self.tokens += choice["token_ids"]
            self.spans += choice["weight_versions"]
            self.reason = choice["finish_reason"] or self.reason

    def end(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self


@pytest.mark.parametrize("kind", ["1", "orbax"])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_after_an_update_a_server_answers_as_a_fresh_one(kind, mode, running, folders, expected):
    assert_answers(running, expected[0], "0")
    body = {"path": str(folders / kind), "mode": mode, "weight_version": "step 7"}
    Places(decoder(0)).read(str(folders / kind))
    with Programs() as programs:
        assert post(running, "/update_weights", body) == {"message": "Weights updated", "weight_version": "step 7"}
        assert_answers(running, expected[1], "step 7")
    assert programs.count == 0
    response = running.client.get("/weight_info")
    assert response.json() == {"weight_version": "step 7"}
    assert response.headers["X-Weight-Version"] == "step 7"
    assert expected[0] != expected[1]


def test_weights_without_a_name_get_the_next_number(running, folders):
    assert post(running, "/update_weights", {"path": str(folders / "1")})["weight_version"] == "1"


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("nowhere", 404, "there is nothing at"),
        ("no-weights", 404, "has neither model.safetensors"),
        ("empty", 404, "config.json"),
        ("damaged", 400, "is not a whole safetensors file"),
        ("orbax-damaged", 400, "is damaged or does not fit"),
        ("no-json", 400, "config.json"),
        ("epsilon", 400, "another model: norm_eps is 0.01, of the server's model 1e-06"),
        ("wider", 400, "another model: mlp_width is 32, of the server's model 24"),
        ("deeper", 400, "another model: num_layers is 2, of the server's model 1"),
        ("nan", 400, "layers.0.down' has a number that is not finite"),
        ("inf", 400, "layers.0.down' has a number that is not finite"),
        ("adapters", 400, "merge them"),
        ("text", 400, "is no model"),
    ],
)
def test_weights_that_are_refused_leave_the_old_ones(name, status, reason, running, folders, expected):
    held = Held(running)
    error = post(running, "/update_weights", {"path": str(folders / name), "weight_version": "bad"}, status=status)
    assert reason in error["error"]["message"]
    assert error["error"]["param"] == "path"
    assert get(running, "/is_paused") == {"is_paused": True}
    post(running, "/resume")
    assert held.end().tokens == expected[0][0]
    assert_answers(running, expected[0], "0")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "path"),
        ({"path": 3}, "path"),
        ({"path": "", "mode": "now"}, "mode"),
        ({"path": "x", "weight_version": "line\nbreak"}, "weight_version"),
        ({"path": "x", "weight_version": ""}, "weight_version"),
        ({"path": "x", "weight_version": "ä"}, "weight_version"),
        ({"path": "x", "weight_version": "x" * 129}, "weight_version"),
        ({"path": "x", "update_info": {}}, "update_info"),
        ({"path": "HuggingFaceTB/SmolLM2-135M"}, "nothing at"),
        ({"path": "x\0y"}, "nothing at"),
        ({"path": "x" * 5000}, "path"),
    ],
)
def test_updates_that_make_no_sense_are_refused(body, named, running):
    error = post(running, "/update_weights", body, status=(400, 404))["error"]
    assert named in f"{error['param']} {error['message']}"
    assert get(running, "/weight_info") == {"weight_version": "0"}


def test_a_request_goes_on_with_new_weights(running, folders, expected):
    held = Held(running)
    num_old = len(held.tokens)
    assert 0 < num_old < 50
    post(running, "/update_weights", {"path": str(folders / "1"), "mode": "keep", "weight_version": "new"})
    assert get(running, "/is_paused") == {"is_paused": True}
    post(running, "/resume")
    held.end()
    merged = {}
    for span in held.spans:
        start, end = merged.get(span["version"], (span["start"], span["start"]))
        assert end == span["start"]
        merged[span["version"]] = start, span["end"]
    assert list(merged) == ["0", "new"]
    cut = merged["0"][1]
    assert num_old <= cut < 50
    assert merged == {"0": (0, cut), "new": (cut, 50)}
    assert held.tokens[:cut] == expected[0][0][:cut]
    assert held.tokens != expected[0][0]
    # Nothing of the old weights is left where prompts are kept.
    assert_answers(running, expected[1], "new")


def test_requests_are_answered_by_the_old_weights_first(running, folders, expected):
    held = Held(running)
    post(running, "/update_weights", {"path": str(folders / "1"), "mode": "wait", "weight_version": "new"})
    assert held.end().tokens == expected[0][0]
    assert {span["version"] for span in held.spans} == {"0"}
    post(running, "/resume")
    assert_answers(running, expected[1], "new")


def test_requests_end_before_the_new_weights(running, folders, expected):
    held = Held(running)
    post(running, "/update_weights", {"path": str(folders / "1"), "weight_version": "new"})
    assert held.end().reason == "abort"
    assert held.tokens == expected[0][0][: len(held.tokens)]
    post(running, "/resume")
    assert_answers(running, expected[1], "new")


@contextlib.contextmanager
def slow_reading(monkeypatch):
    """Reading waits until the end of the `with`."""
    begun, may_end, read = threading.Event(), threading.Event(), Places.read

    def wait(self, path):
        begun.set()
        assert may_end.wait(30)
        return read(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Places, "read", wait)
        try:
            yield begun
        finally:
            may_end.set()


def test_one_update_at_a_time_while_others_are_answered(running, folders, expected, monkeypatch):
    results = []
    body = {"path": str(folders / "1"), "weight_version": "new"}
    thread = threading.Thread(target=lambda: results.append(post(running, "/update_weights", body)))
    with slow_reading(monkeypatch) as begun:
        thread.start()
        assert begun.wait(30)
        for path in ("/update_weights", "/update_weight_version", "/sleep", "/wake_up"):
            bodies = {"/update_weights": body, "/update_weight_version": {"new_version": "x"}}
            assert post(running, path, bodies.get(path), status=409)["error"]["type"] == "ConflictError"
        assert_answers(running, expected[0], "0")
    thread.join(30)
    assert results == [{"message": "Weights updated", "weight_version": "new"}]
    assert_answers(running, expected[1], "new")


def test_an_update_that_is_overtaken_changes_nothing(running, folders, expected, monkeypatch):
    """It waits for a request that a pause holds again."""
    held, results = Held(running), []
    monkeypatch.setattr(running.service.engine.engine, "step", list)
    body = {"path": str(folders / "1"), "mode": "wait"}
    thread = threading.Thread(target=lambda: results.append(running.client.post("/update_weights", json=body)))
    thread.start()
    while running.service.engine.gate.state != "updating":
        time.sleep(0.001)
    refused = running.generate(PROMPT, status=503)
    assert "new weights" in refused["error"]["message"]
    post(running, "/pause?mode=keep")
    monkeypatch.undo()
    thread.join(30)
    assert results[0].status_code == 409
    post(running, "/resume")
    assert held.end().tokens == expected[0][0]
    assert_answers(running, expected[0], "0")


def test_pause_and_resume(running, expected):
    for mode in ("abort", "wait"):
        assert post(running, f"/pause?mode={mode}") == {"status": "paused"}
        assert get(running, "/is_paused") == {"is_paused": True}
        assert "paused" in running.generate(PROMPT, status=503)["error"]["message"]
        assert running.client.get("/health").status_code == 200
        assert post(running, "/resume") == {"status": "resumed"}
        assert get(running, "/is_paused") == {"is_paused": False}
    post(running, "/pause?mode=never", status=400)
    assert_answers(running, expected[0], "0")


@pytest.mark.parametrize("body", [None, {}, {"request_ids": None}])
def test_all_requests_can_be_ended(body, running):
    held = Held(running)
    assert post(running, "/abort_requests", body) == {"status": "aborted", "aborted": 1}
    assert held.end().reason == "abort"


def test_requests_are_ended_by_their_names(running):
    held = Held(running)
    assert post(running, "/abort_requests", {"request_ids": ["another"]})["aborted"] == 0
    (name,) = running.service.engine.request_ids
    assert post(running, "/abort_requests", {"request_ids": [name]})["aborted"] == 1
    assert held.end().reason == "abort"


def test_names_of_requests():
    names = ["generate-tokens-a", "cmpl-a", "cmpl-b-0", "cmpl-b-1", "chatcmpl-c-1"]
    assert _named(names, ["a"]) == names[:2]
    assert _named(names, ["b"]) == _named(names, ["cmpl-b"]) == names[2:4]
    assert _named(names, ["cmpl-b-1"]) == names[3:4]
    assert _named(names, ["c"]) == []
    assert _named(names, ["c-1"]) == _named(names, ["chatcmpl-c-1"]) == names[4:]


def test_weights_can_be_renamed(running, expected):
    body = {"new_version": "other name"}
    assert post(running, "/update_weight_version", body) == {"success": True, "new_version": "other name"}
    assert_answers(running, expected[0], "other name")
    post(running, "/update_weight_version", {"new_version": " x"}, status=400)


def num_on_device():
    """Embeddings of the tiny decoder."""
    return sum(leaf.shape == (CONFIG.vocab_size, CONFIG.width) for leaf in jax.live_arrays())


def test_sleep_and_wake_up(running, expected):
    before = num_on_device()
    assert post(running, "/sleep") == {"status": "sleeping", "level": 1}
    # The embedding and the head.
    assert num_on_device() == before - 2
    assert get(running, "/is_sleeping") == {"is_sleeping": True}
    assert "asleep" in running.generate(PROMPT, status=503)["error"]["message"]
    assert running.client.get("/health").status_code == 200
    for path in ("/pause", "/resume"):
        assert "asleep" in post(running, path, status=409)["error"]["message"]
    with Programs() as programs:
        assert post(running, "/wake_up") == {"status": "awake", "tags": None}
        assert_answers(running, expected[0], "0")
    assert programs.count == 0
    assert get(running, "/is_sleeping") == {"is_sleeping": False}
    assert num_on_device() == before


def test_a_server_wakes_up_in_parts(running, expected):
    post(running, "/sleep")
    assert post(running, "/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    running.generate(PROMPT, status=503)
    assert get(running, "/is_sleeping") == {"is_sleeping": True}
    post(running, "/wake_up?tags=all", status=400)
    assert post(running, "/wake_up?tags=kv_cache")["status"] == "awake"
    assert_answers(running, expected[0], "0")


def test_dropped_weights_come_by_an_update(running, folders, expected):
    post(running, "/sleep?level=2")
    assert "/update_weights" in post(running, "/wake_up", status=409)["error"]["message"]
    running.generate(PROMPT, status=503)
    post(running, "/update_weights", {"path": str(folders / "nan")}, status=400)
    post(running, "/wake_up", status=409)
    post(running, "/update_weights", {"path": str(folders / "1"), "weight_version": "new"})
    assert get(running, "/weight_info") == {"weight_version": "new"}
    running.generate(PROMPT, status=503)
    assert post(running, "/wake_up")["status"] == "awake"
    assert_answers(running, expected[1], "new")


def test_dropped_weights_come_between_the_two_parts_of_waking_up(running, folders, expected):
    post(running, "/sleep?level=2")
    assert post(running, "/wake_up?tags=weights")["status"] == "sleeping"
    post(running, "/wake_up?tags=kv_cache", status=409)
    post(running, "/update_weights", {"path": str(folders / "1"), "weight_version": "new"})
    assert post(running, "/wake_up?tags=kv_cache")["status"] == "awake"
    assert_answers(running, expected[1], "new")


def test_sleep_by_mode_and_level(running, expected):
    held = Held(running)
    post(running, "/sleep?mode=wait")
    assert held.end().tokens == expected[0][0]
    post(running, "/sleep?level=2")
    post(running, "/wake_up", status=409)
    for query in ("level=0", "level=3", "level=x", "mode=keep"):
        post(running, f"/sleep?{query}", status=400)


def test_a_paused_server_sleeps_and_is_paused_afterwards(running, expected):
    post(running, "/pause")
    post(running, "/sleep")
    post(running, "/wake_up")
    assert get(running, "/is_paused") == {"is_paused": True}
    running.generate(PROMPT, status=503)
    post(running, "/resume")
    assert_answers(running, expected[0], "0")


def test_small_ones(running):
    assert post(running, "/reset_prefix_cache") == {"success": True}
    assert get(running, "/get_world_size") == {"world_size": 1}


def test_a_server_that_was_not_asked_to_cannot_be_steered():
    with running_server(is_warm=False) as running:
        for path in PATHS:
            for response in (running.client.get(path), running.client.post(path, content=b"{")):
                assert response.status_code == 403
                error = response.json()["error"]
                assert error["type"] == "PermissionDeniedError"
                assert "--enable-rl-endpoints" in error["message"]
        assert not set(PATHS) & set(get(running, "/openapi.json")["paths"])


def test_an_update_of_a_server_that_stops_changes_nothing(folders):
    with running_server(models.load(folders / "0")[0], None, config=RL, is_warm=False) as running:
        running.service.engine.gate.turn("draining")
        body = {"path": str(folders / "1")}
        for path in ("/update_weights", "/pause", "/resume", "/sleep"):
            post(running, path, body if path == "/update_weights" else None, status=503)
        assert np.array_equal(running.service.engine.engine.model.embedding[...], decoder(0).embedding[...])
