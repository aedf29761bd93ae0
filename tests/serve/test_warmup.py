import pytest
from engine_models import MODEL, PROMPTS, SETTINGS, WORDS, Programs, changed

from jaxmask import SamplingParams
from serve.config import EngineConfig
from serve.engine import Engine
from serve.warmup import warm_up

SHAPE = {"min_model_len": 64, "steps_per_chunk": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, return_sampling_mask=False)


def answer(engine, num_rows, params):
    for row in range(num_rows):
        engine.add_request(f"{row}", PROMPTS[row], params if row else GREEDY)
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize(("all_sizes", "sizes"), [(False, [1]), (True, [1, 2, 4, 1])])
def test_nothing_is_compiled_for_usual_requests(all_sizes, sizes):
    engine = Engine(MODEL, WORDS, EngineConfig(**SETTINGS, **SHAPE))
    with Programs() as programs:
        warm_up(engine, all_sizes=all_sizes)
    assert programs.count > 0
    assert not engine.has_unfinished_requests()
    with Programs() as programs:
        for num_rows in sizes:
            answer(engine, num_rows, changed(max_tokens=9, logprobs=5, seed=1))
    assert programs.count == 0


def test_engines_without_masks_and_with_little_room_are_warmed_up_too():
    for settings in ({}, {"max_model_len": 2}):
        engine = Engine(MODEL, None, EngineConfig(**settings))
        warm_up(engine)
        engine.add_request("one", [5], SamplingParams(temperature=0.0, max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
        assert engine.counters.num_tokens > 0
