"""Prompts that are kept, and prompts that are read bit by bit."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from engine_models import PROMPTS, SETTINGS, WORDS, Programs, V, assert_truthful, changed, known_model, same, warm
from reading_models import reader, tiny_decoder

from jaxmask import PromptLookup, SamplingParams
from serve.config import EngineConfig
from serve.engine import Engine

MODEL, OTHER = reader(), reader(seed=1)
SHAPE = {"min_num_seqs": 4, "min_model_len": 64, "steps_per_chunk": 4, "prefill_chunk_size": 24, "prefill_tokens": 24}


def ids(size, low=3, high=V, seed=0):
    """The same ones for the same arguments."""
    return np.random.default_rng([size, low, high, seed]).integers(low, high, size).tolist()


def finish(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


def answer(engine, prompt, params, name="one", **options):
    engine.add_request(name, prompt, params, **options)
    return finish(engine)[name]


@pytest.fixture(scope="module")
def engine():
    """Has compiled what all further prompts of this shape need."""
    engine = Engine(MODEL, WORDS, EngineConfig(**SETTINGS, **SHAPE, enable_prefix_caching=True))
    warm(engine)
    for prompt in ([3] * 20, [3] * 20, [3] * 22, [5] * 50):
        answer(engine, prompt, changed(seed=0, n=2))
    return engine


@pytest.fixture(autouse=True)
def nothing_compiles(request):
    if "engine" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("engine")
    engine.reset_prefix_cache()
    with Programs() as programs:
        yield
    assert programs.count == 0


def hits(engine):
    return engine.counters.num_prefix_hits


def test_a_prompt_that_was_read_is_not_read_again(engine):
    prompt, params = (
        ids(30),
        changed(seed=3, n=2, repetition_penalty=1.4, presence_penalty=0.5, bad_words=[[9], [4, 8]]),
    )
    before = hits(engine)
    first = answer(engine, prompt, params)
    assert (hits(engine), first.num_cached_tokens) == (before, 0)
    again = answer(engine, prompt, params)
    assert (hits(engine), again.num_cached_tokens) == (before + 29, 29)
    assert same(first) == same(again)
    for output in (first, again):
        for one in output.outputs:
            assert_truthful(dataclasses.replace(output, outputs=[one]), params, MODEL)


@pytest.mark.parametrize(("shared", "rest"), [(20, 1), (20, 7), (20, 30), (16, 3), (33, 2), (30, 0)])
def test_of_prompts_that_begin_alike_the_rest_is_read(engine, shared, rest):
    """Whatever came after the beginning, and with settings that look back at all of the prompt."""
    beginning = ids(shared, 3, 20)
    params = changed(seed=1, repetition_penalty=1.5, frequency_penalty=0.3)
    answer(engine, [*beginning, 21, *ids(6)], params)
    output = answer(engine, [*beginning, *ids(rest, 22)], params)
    assert output.num_cached_tokens == min(shared, shared + rest - 1)
    assert_truthful(output, params, MODEL)


def test_a_beginning_that_saves_nothing_is_not_used(engine):
    """45 tokens are two passes of 24, after 16 of them still two, after 22 of them one."""
    params = changed(seed=1)
    for shared, num_cached in ((16, 0), (22, 22)):
        beginning = ids(shared, 3, 20, seed=shared)
        answer(engine, [*beginning, 21, *ids(6)], params)
        output = answer(engine, [*beginning, *ids(46 - shared, 22)], params)
        assert output.num_cached_tokens == num_cached
        assert_truthful(output, params, MODEL)


def test_short_prompts_and_other_salts_share_nothing(engine):
    params = changed(seed=2)
    for prompt, salts in ((ids(16), (None, None)), (ids(29), (None, "a")), (ids(30), ("a", "b"))):
        outputs = [answer(engine, prompt, params, cache_salt=salt) for salt in salts]
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert same(outputs[0]) == same(outputs[1])
    assert answer(engine, prompt, params, cache_salt="b").num_cached_tokens == 29
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string"):
        engine.check("salted", prompt, params, cache_salt="")


def test_what_is_kept_belongs_to_the_weights_that_read_it(engine):
    prompt, params, other = ids(30), changed(seed=4), OTHER
    answer(engine, prompt, params)
    engine.update_weights(other)
    new = answer(engine, prompt, params)
    assert new.num_cached_tokens == 0
    assert_truthful(new, params, other)
    engine.update_weights(MODEL)
    assert_truthful(answer(engine, prompt, params), params, MODEL)
    assert engine.reset_prefix_cache() is True
    assert answer(engine, prompt, params).num_cached_tokens == 0


def test_a_prompt_half_read_when_the_weights_change_is_not_kept(engine):
    prompt, params = ids(40), changed(seed=4)
    engine.add_request("half", prompt, params)
    engine.step()
    assert engine.num_running == 1
    engine.update_weights(MODEL)
    engine.add_request("whole", prompt, params)
    outputs = finish(engine)
    assert same(outputs["half"]) == same(outputs["whole"])
    # The other was read by the new weights alone.
    assert outputs["whole"].num_cached_tokens == 0
    assert answer(engine, prompt, params).num_cached_tokens == 39


def test_prompts_that_come_together_share_what_the_first_of_them_leaves(engine):
    """Groups are read once, and the second prompt finds the beginning that the first left a moment ago."""
    beginning, params = ids(24, 3, 20), changed(seed=6, n=2)
    before = hits(engine)
    engine.add_request("first", [*beginning, 21], params)
    engine.add_request("second", [*beginning, 22, 23], params)
    outputs = finish(engine)
    assert hits(engine) - before == 24
    assert [outputs[name].num_cached_tokens for name in ("first", "second")] == [0, 24]
    for output in outputs.values():
        assert_truthful(output, params, MODEL)


def test_others_go_on_while_a_long_prompt_is_read(engine):
    neighbour, long = changed(seed=7, max_tokens=40, ignore_eos=True), changed(seed=8)
    engine.add_request("neighbour", PROMPTS[0], neighbour, is_streamed=True)
    for _ in range(3):
        engine.step()
    prompt = ids(50)
    engine.add_request("long", prompt, long, is_streamed=True)
    order = []
    outputs = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            order.append(output.request_id)
            outputs += [output] if output.request_id == "long" else []
    # 49 tokens, 24 between two chunks, and one chunk more until the host sees the next.
    assert order.index("long") >= 4
    assert set(order[: order.index("long")]) == {"neighbour"}
    token_ids = [token for output in outputs for one in output.outputs for token in one.token_ids]
    assert token_ids == answer(engine, prompt, long).outputs[0].token_ids


def test_a_request_that_ends_while_its_prompt_is_read_gives_its_slot_back(engine):
    params = changed(seed=9, max_tokens=12, ignore_eos=True)
    engine.add_request("long", ids(50), params)
    engine.add_request("other", PROMPTS[1], params)
    engine.step()
    assert engine.num_running == 2
    engine.abort_request("long")
    assert engine.num_running == 1
    outputs = finish(engine)
    assert (outputs["long"].outputs[0].finish_reason, outputs["long"].outputs[0].token_ids) == ("abort", [])
    assert_truthful(outputs["other"], params, MODEL)
    # All four slots are there, and one of two that wait for the same prompt can go.
    prompt = ids(50)
    for name in "abcd":
        engine.add_request(name, prompt, params)
    engine.step()
    assert engine.num_running == 4
    engine.abort_request(["a", "c"])
    outputs = finish(engine)
    for name in "bd":
        assert_truthful(outputs[name], params, MODEL)


def test_prompts_come_and_go(engine):
    """Of all lengths, new ones and known ones, with and without neighbours; the fixture sees that nothing compiles."""
    beginnings = [ids(size) for size in (18, 30, 45)]
    prompts = [
        [*beginning[: len(beginning) - cut], *ids(more)]
        for beginning in beginnings
        for cut in (0, 3)
        for more in (0, 2)
    ]
    prompts += [ids(size) for size in (1, 2, 8, 9, 15, 16, 17, 31, 32, 33, 48, 55)]
    settings = [
        changed(seed=seed, n=1 + seed % 2, presence_penalty=seed % 3 / 2, max_tokens=6, top_p=1.0, min_p=0.0)
        for seed in range(8)
    ]
    pairs = list(itertools.product(range(len(prompts)), range(2)))
    for number, (prompt, _) in enumerate(pairs):
        engine.add_request(str(number), prompts[prompt], settings[number % 8])
    outputs = finish(engine)
    for number in range(len(pairs)):
        assert_truthful(outputs[str(number)], settings[number % 8], MODEL)
    assert engine.num_running == engine.num_waiting == 0
    assert engine.capacity_share == 0


def test_release_leaves_the_weights_alone(engine):
    engine.release()
    empty = len(jax.live_arrays())
    first = answer(engine, [3, 4] * 20, changed(seed=1))
    assert len(jax.live_arrays()) > empty
    engine.add_request("running", PROMPTS[0], changed(seed=1))
    with pytest.raises(ValueError, match="requests are being answered"):
        engine.release()
    finish(engine)
    engine.release()
    assert len(jax.live_arrays()) == empty
    assert same(answer(engine, [3, 4] * 20, changed(seed=1))) == same(first)


def test_only_models_that_read_on_keep_prompts():
    with pytest.raises(ValueError, match="enable_prefix_caching needs a model that reads on"):
        Engine(known_model(), WORDS, EngineConfig(enable_prefix_caching=True))
    with pytest.raises(ValueError, match="enable_prefix_caching does not go with speculation"):
        EngineConfig(enable_prefix_caching=True, speculation=PromptLookup(num_tokens=2, max_ngram=2, min_ngram=1))
    with pytest.raises(ValueError, match="prefix_cache_tokens must be at least 1"):
        EngineConfig(prefix_cache_tokens=0)


@pytest.mark.parametrize("windows", [{}, {"sliding_window": 6, "full_layers": (1,)}], ids=["all", "windows"])
def test_a_decoder_answers_the_same_whether_its_prompts_were_kept(windows):
    """With windows only a beginning that was read whole is of use."""
    decoder = tiny_decoder(**windows)
    settings = {
        "return_sampling_mask": True,
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": 2,
        "min_num_seqs": 2,
        "min_model_len": 64,
        "prefill_chunk_size": 16,
        "steps_per_chunk": 4,
    }
    params = SamplingParams(
        temperature=1.1, seed=0, top_k=12, max_tokens=9, logprobs=0, n=2, repetition_penalty=1.3, frequency_penalty=0.2
    )
    beginning = ids(30, 0, 50)
    prompts = [
        beginning,
        beginning,
        [*beginning, *ids(20, 0, 50)],
        [*beginning, *ids(3, 0, 50)],
        [*beginning[:20], 1, 2],
    ]
    found = {}
    for is_on in (False, True):
        engine = Engine(decoder, None, EngineConfig(**settings, enable_prefix_caching=is_on))
        found[is_on] = [answer(engine, prompt, params) for prompt in prompts]
    cached = [output.num_cached_tokens for output in found[True]]
    assert cached == ([0, 29, 29, 29, 0] if windows else [0, 29, 29, 30, 20])
    assert {output.num_cached_tokens for output in found[False]} == {None}
    for plain, kept in zip(found[False], found[True], strict=True):
        for one, other in zip(plain.outputs, kept.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert one.sampling_mask == other.sampling_mask
            logprobs = [
                [entries[token].logprob for token, entries in zip(each.token_ids, each.logprobs, strict=True)]
                for each in (one, other)
            ]
            np.testing.assert_allclose(*logprobs, rtol=0, atol=1e-5)
