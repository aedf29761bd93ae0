import dataclasses
import gc
import time

import jax
import numpy as np
import pytest
from engine_models import (
    MODEL,
    PROMPTS,
    SETTINGS,
    SHAPE,
    WORDS,
    Programs,
    assert_truthful,
    changed,
    known_model,
    same,
    warm,
)

from jaxmask import SamplingParams
from serve.config import EngineConfig
from serve.engine import Engine
from serve.outputs import SamplingMask

OTHER = known_model(seed=1)
SMALLER = jax.tree.map(lambda leaf: leaf[:7], OTHER)


def make(model=MODEL, **settings):
    return Engine(model, WORDS, EngineConfig(**SETTINGS, **settings))


def finish(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


@pytest.fixture(scope="module")
def engine():
    engine = make(**SHAPE)
    warm(engine)
    return engine


@pytest.fixture(autouse=True)
def nothing_compiles(request):
    if "engine" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("engine")
    with Programs() as programs:
        yield
    assert programs.count == 0


def joined(deltas, index):
    parts = [part for delta in deltas for part in delta.outputs if part.index == index]
    masks = [part.sampling_mask for part in parts]
    return {
        "text": "".join(part.text for part in parts),
        "token_ids": [token for part in parts for token in part.token_ids],
        "mask": SamplingMask.concatenate(masks),
        "logprobs": [entries for part in parts for entries in part.logprobs],
        "reasons": [part.finish_reason for part in parts],
    }


def test_deltas_of_a_stream_are_what_the_request_answers(engine):
    """With stop strings, several samples, and neighbours that are not streamed."""
    params = changed(seed=3, n=2, max_tokens=20, ignore_eos=True, stop=["thth", "q"])
    engine.add_request("whole", PROMPTS[2], params)
    whole = finish(engine)["whole"]
    engine.add_request("parts", PROMPTS[2], params, is_streamed=True)
    engine.add_request("other", PROMPTS[3], changed(seed=1))
    deltas, ended = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            (deltas if output.request_id == "parts" else ended).append(output)
    assert len(ended) == 1
    assert len(deltas) > 2
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    for completion in whole.outputs:
        found = joined(deltas, completion.index)
        assert found["text"] == completion.text
        assert found["token_ids"] == completion.token_ids
        assert found["mask"] == completion.sampling_mask
        assert found["logprobs"] == completion.logprobs
        assert found["reasons"][-1] == completion.finish_reason
        assert set(found["reasons"][:-1]) <= {None}
    assert max(len(part.token_ids) for delta in deltas for part in delta.outputs) <= 2 * engine.config.stream_interval


def test_aborted_requests_give_out_what_was_read(engine):
    long = changed(max_tokens=50, ignore_eos=True, seed=1)
    for name in "abcdef":
        engine.add_request(name, PROMPTS[0], long)
    assert engine.num_waiting == 6
    for _ in range(4):
        engine.step()
    assert (engine.num_running, engine.num_waiting) == (4, 2)
    engine.abort_request(["a", "f", "nobody"])
    outputs = {output.request_id: output.outputs[0] for output in engine.step()}
    assert {name: output.finish_reason for name, output in outputs.items()} == {"a": "abort", "f": "abort"}
    assert 0 < len(outputs["a"].token_ids) < 50
    assert len(outputs["a"].sampling_mask) == len(outputs["a"].logprobs) == len(outputs["a"].token_ids)
    assert outputs["f"].token_ids == []
    # Its place was taken.
    assert (engine.num_running, engine.num_waiting) == (4, 0)
    rest = finish(engine)
    assert set(rest) == set("bcde")
    assert {len(output.outputs[0].token_ids) for output in rest.values()} == {50}
    assert rest["e"].outputs[0].token_ids[: len(outputs["a"].token_ids)] == outputs["a"].token_ids
    engine.add_request("a", PROMPTS[0], long)
    engine.abort_request("a")
    assert finish(engine)["a"].finished


def test_names_are_used_once_at_a_time(engine):
    engine.add_request("same", PROMPTS[0], changed(seed=1))
    with pytest.raises(ValueError, match="request_id must be new, got 'same'"):
        engine.add_request("same", PROMPTS[1], changed(seed=1))
    first = finish(engine)
    engine.add_request("same", PROMPTS[0], changed(seed=1))
    assert same(finish(engine)["same"]) == same(first["same"])


def test_new_weights_answer_what_comes_after(engine):
    params = changed(seed=4, ignore_eos=True)
    engine.update_weights(OTHER)
    engine.add_request("new", PROMPTS[4], params)
    assert_truthful(finish(engine)["new"], params, OTHER)
    with pytest.raises(ValueError, match="must have the shapes and types of the one before"):
        engine.update_weights(SMALLER)
    engine.update_weights(MODEL)
    engine.add_request("old", PROMPTS[4], params)
    assert_truthful(finish(engine)["old"], params, MODEL)


def test_each_token_knows_its_weights(engine):
    """Whole answers, and deltas of streams with the places of their own tokens."""
    params = changed(seed=4, n=2, max_tokens=30, ignore_eos=True)
    engine.update_weights(MODEL, "first")
    engine.add_request("whole", PROMPTS[4], params)
    engine.add_request("parts", PROMPTS[4], params, is_streamed=True)
    deltas, whole, versions = [], [], ["first"]
    for _ in range(6):
        for output in engine.step():
            deltas.append(output)
        engine.update_weights(OTHER if len(versions) % 2 else MODEL, "second" if len(versions) == 1 else None)
        versions.append(engine.weight_version)
    while engine.has_unfinished_requests():
        for output in engine.step():
            (whole if output.request_id == "whole" else deltas).append(output)
    assert versions == ["first", "second", "second+1", "second+1+1", "second+1+1+1", "second+1+1+1+1", versions[-1]]
    for completion in whole[0].outputs:
        spans = completion.weight_versions
        # Chunks of four steps each, as one of the two is streamed.
        assert spans[:3] == [("first", 0, 4), ("second", 4, 8), ("second+1", 8, 12)]
        assert spans[-1].end == len(completion.token_ids) == 30
        parts = [part for delta in deltas for part in delta.outputs if part.index == completion.index]
        assert [span for part in parts for span in part.weight_versions if part.token_ids] == spans[:6] + [
            (versions[-1], start, min(start + 4, 30)) for start in range(24, 30, 4)
        ]
    engine.update_weights(MODEL, "9")
    engine.update_weights(MODEL)
    assert engine.weight_version == "10"


def test_tokens_past_a_stop_string_belong_to_no_weights(engine):
    params = changed(seed=3, max_tokens=40, ignore_eos=True)
    engine.add_request("long", PROMPTS[2], params)
    text = finish(engine)["long"].outputs[0].text
    engine.add_request("cut", PROMPTS[2], changed(seed=3, max_tokens=40, ignore_eos=True, stop=[text[2:5]]))
    completion = finish(engine)["cut"].outputs[0]
    assert completion.stop_reason == text[2:5]
    assert [(span.start, span.end) for span in completion.weight_versions] == [(0, len(completion.token_ids))]


def test_times_of_a_request(engine):
    long = changed(max_tokens=30, ignore_eos=True, seed=1)
    before = time.monotonic()
    for name in "abcd":
        engine.add_request(name, PROMPTS[0], long)
    engine.add_request("waits", PROMPTS[1], long)
    engine.add_request("never", PROMPTS[1], long)
    engine.step()
    engine.abort_request("never")
    assert 0 < engine.capacity_share <= 1
    outputs = finish(engine)
    assert engine.capacity_share == 0
    never, first, waits = (outputs[name].metrics for name in ("never", "a", "waits"))
    assert before <= never.arrival_time
    assert (never.first_scheduled_time, never.first_token_time, never.last_token_time) == (None, None, None)
    for metrics in (first, waits):
        times = [getattr(metrics, field.name) for field in dataclasses.fields(metrics)]
        assert times == sorted(times)
        assert times[-1] <= time.monotonic()
    assert first.first_token_time < first.last_token_time <= waits.first_scheduled_time


def test_many_completions_do_not_keep_a_later_request_out(engine):
    many = changed(seed=1, n=24, max_tokens=6, ignore_eos=True)
    engine.add_request("many", PROMPTS[0], many)
    engine.step()
    engine.add_request("one", PROMPTS[1], changed(seed=2, max_tokens=6))
    order = []
    while engine.has_unfinished_requests():
        order += [(output.request_id, engine.num_waiting > 0) for output in engine.step()]
    assert order == [("one", True), ("many", False)]


@pytest.mark.slow
def test_a_step_is_quick_however_many_wait(engine, unchecked):
    params = changed(seed=1, max_tokens=2)
    requests = [engine.check(str(number), PROMPTS[number % 8], params) for number in range(20_000)]
    for request in requests:
        engine.submit(request)
    started = time.perf_counter()
    for _ in range(20):
        engine.step()
    assert time.perf_counter() - started < 4
    assert engine.num_waiting > 19_000
    started = time.perf_counter()
    engine.abort_request(request.request_id for request in requests)
    assert len(engine.step()) + 80 >= 20_000
    assert time.perf_counter() - started < 10
    assert (engine.num_waiting, engine.num_running) == (0, 0)


def test_a_row_without_finite_logits_ends_alone(engine):
    """P24."""
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
    # What comes after this prompt and the first of the tokens it is answered with.
    engine.add_request("probe", PROMPTS[1], changed(seed=2))
    first = finish(engine)["probe"].outputs[0].token_ids[:1]
    table = np.array(MODEL.table)
    table[MODEL.state_after(PROMPTS[1] + first)] = np.nan
    broken = dataclasses.replace(MODEL, table=jax.device_put(table))
    engine.update_weights(broken)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, changed(seed=2))
    outputs = finish(engine)
    engine.update_weights(MODEL)
    ended = outputs["1"].outputs[0]
    assert (ended.finish_reason, ended.token_ids, len(ended.sampling_mask)) == ("error", first, 1)
    for number in (0, 2):
        assert_truthful(outputs[str(number)], changed(seed=2), broken)


@pytest.mark.slow
def test_room_grows_while_requests_run():
    """More slots, longer ones, and edits that look back at what was drawn before they came."""
    engine = make(steps_per_chunk=2)
    plain = changed(seed=1, max_tokens=40, ignore_eos=True)
    waves = [
        [("first", [5, 6], plain)],
        [
            ("second", PROMPTS[0], changed(seed=2, max_tokens=30, frequency_penalty=0.5, ignore_eos=True)),
            ("third", PROMPTS[1], changed(seed=3, max_tokens=30, bad_words=[[8]], ignore_eos=True)),
        ],
        [("fourth", PROMPTS[2], changed(seed=4, max_tokens=30, repetition_penalty=1.3, bad_words=[[9, 5, 7]]))],
    ]
    outputs, params = [], {}
    for wave in waves:
        for name, prompt, one in wave:
            engine.add_request(name, prompt, one)
            params[name] = one
        for _ in range(3):
            outputs += engine.step()
        assert engine.num_running == len(params)
    outputs += finish(engine).values()
    assert {output.request_id for output in outputs} == set(params)
    for output in outputs:
        assert_truthful(output, params[output.request_id], MODEL)


@pytest.mark.slow
def test_twenty_thousand_requests_leave_nothing_behind(unchecked):
    """Containers, arrays on the device, and objects of the engine's own."""
    engine = Engine(MODEL, WORDS, EngineConfig(max_num_seqs=64, min_num_seqs=64))
    params = [SamplingParams(temperature=0.7, top_k=5, max_tokens=1 + number % 4, seed=number) for number in range(8)]

    def serve(count):
        for number in range(count):
            engine.add_request(str(number), PROMPTS[number % 8], params[number % 8])
        num_tokens = sum(len(output.outputs[0].token_ids) for output in finish(engine).values())
        gc.collect()
        own = sum(str(type(one).__module__).startswith("serve.") for one in gc.get_objects())
        return num_tokens, len(jax.live_arrays()), own

    serve(100)
    _, arrays, objects = serve(1000)
    for _ in range(4):
        num_tokens, arrays_after, objects_after = serve(5000)
        assert 5000 < num_tokens < 4 * 5000
        assert arrays_after == arrays
        assert objects_after == objects
    assert (engine.num_running, engine.num_waiting) == (0, 0)
