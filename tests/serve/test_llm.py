import io
import json

import numpy as np
import pytest
from engine_models import (
    EOS,
    MASKED,
    MIXED,
    MODEL,
    PROMPTS,
    SETTINGS,
    SHAPE,
    WORDS,
    Programs,
    assert_truthful,
    changed,
    same,
    warm,
)
from rich.console import Console

import serve
from jaxmask import SamplingParams
from serve.llm import LLM


@pytest.fixture(scope="module")
def llm():
    llm = LLM(MODEL, tokenizer=WORDS, **SETTINGS, **SHAPE)
    warm(llm.engine)
    return llm


@pytest.fixture(autouse=True)
def nothing_compiles(request):
    """Settings, prompts and their number may change: everything runs by the programs of the first call."""
    if "llm" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("llm")
    with Programs() as programs:
        yield
    assert programs.count == 0


def test_every_token_is_what_the_model_says_under_refill(llm):
    """Eleven requests of all kinds on four slots; rows end and others take their places."""
    params = [*MIXED[:8], changed(seed=8, bad_words=[[3, 4], [30, 7]], max_tokens=12), *MIXED[9:]]
    outputs = llm.generate(PROMPTS, params)
    for output, prompt, one in zip(outputs, PROMPTS, params, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.finished
        assert output.prompt_logprobs is None
        assert output.outputs[0].cumulative_logprob == pytest.approx(
            sum(
                entries[token].logprob
                for token, entries in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ),
            abs=1e-5,
        )
        assert_truthful(output, one, MODEL)
    stats = llm.last_stats
    assert stats.num_requests == len(PROMPTS)
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS))
    assert stats.num_tokens == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert stats.compiled.num_programs == 0
    assert 0 <= stats.idle_share < 0.6
    assert llm.engine.num_running == llm.engine.num_waiting == 0
    assert not llm.engine.has_unfinished_requests()


def test_each_answer_is_that_of_the_request_alone(llm):
    together = llm.generate(PROMPTS, MIXED)
    turned = llm.generate(PROMPTS[::-1], MIXED[::-1])[::-1]
    for place, one in enumerate(together):
        alone = llm.generate([PROMPTS[place]] + [[3]] * 3, [MIXED[place]] + [changed(seed=1)] * 3)[0]
        for other in (turned[place], alone):
            assert same(one) == same(other)


def test_fields(llm):
    (output,) = llm.generate("the DEF", changed(seed=3, max_tokens=4, logprobs=2))
    completion = output.outputs[0]
    assert output.prompt == "the DEF"
    assert output.prompt_token_ids == [1, 30, 31, 32]
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert completion.text == WORDS.decode(completion.token_ids)
    assert len(completion.token_ids) == len(completion.sampling_mask) == len(completion.logprobs) == 4
    for token, entries, kept in zip(completion.token_ids, completion.logprobs, completion.sampling_mask, strict=True):
        assert next(iter(entries)) == token
        assert set(entries) <= set(kept)
        assert len(entries) in (min(2, len(kept)), min(3, len(kept)))
        assert all(entry.decoded_token == WORDS.decode([i], False) for i, entry in entries.items())
        assert kept == sorted(kept)
    assert int(output.request_id) == int(llm.generate([3], changed(seed=3))[0].request_id) - 1
    json.dumps([entry.logprob for entries in completion.logprobs for entry in entries.values()], allow_nan=False)


def test_samples_of_a_prompt(llm):
    """P66 and P23: each sample has its own ids, log-probabilities and supports; more of them than there are slots."""
    params = changed(n=6, seed=40, max_tokens=10, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[3]], params)
    assert [completion.index for completion in output.outputs] == list(range(6))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 6
    assert_truthful(output, params, MODEL)
    assert same(llm.generate([PROMPTS[3]], params)[0]) == same(output)
    for index in (0, 5):
        (alone,) = llm.generate([PROMPTS[3]], changed(seed=40 + index, max_tokens=10, ignore_eos=True))
        assert alone.outputs[0].token_ids == output.outputs[index].token_ids
    assert llm.last_stats.num_tokens == 10
    assert llm.generate([PROMPTS[3], PROMPTS[2]], params)[1].outputs[5].index == 5
    assert llm.last_stats.num_tokens == 120


def test_a_seed_is_not_touched_by_neighbours_without_one(llm):
    """P22."""
    seeded, free = changed(seed=42), changed(seed=None)
    alone = same(llm.generate([PROMPTS[0]], seeded)[0])
    outputs = llm.generate([PROMPTS[0], *PROMPTS[:6]], [free, seeded, free, changed(seed=1), free, free, free])
    assert same(outputs[1]) == alone
    repeated = llm.generate([PROMPTS[0]] * 5, free)
    assert len({tuple(output.outputs[0].token_ids) for output in repeated}) == 5


def test_seeds_of_requests_without_one_follow_from_that_of_the_engine(llm):
    def drawn(seed):
        again = LLM(MODEL, tokenizer=WORDS, **SETTINGS, **SHAPE, seed=seed)
        warm(again.engine)
        return [same(output) for output in again.generate([PROMPTS[2]] * 3, changed(seed=None))]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)


def test_the_last_token_is_the_one_that_ends_the_completion(llm):
    """P39, P21 and P20: EOS and stop ids are kept, with all that is theirs."""
    always = {EOS: 100.0}
    params = [
        changed(logit_bias=always),
        changed(logit_bias=always, ignore_eos=True),
        changed(logit_bias=always, min_tokens=3),
        changed(allowed_token_ids=[7], stop_token_ids=[7]),
        changed(logit_bias=always, ignore_eos=True, stop_token_ids=[EOS]),
    ]
    outputs = llm.generate([PROMPTS[0]] * 5, params)
    found = [(len(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]
    assert found == [(1, "stop", None), (9, "length", None), (4, "stop", None), (1, "stop", 7), (1, "stop", EOS)]
    for output, one in zip(outputs, params, strict=True):
        completion = output.outputs[0]
        assert len(completion.token_ids) == len(completion.sampling_mask) == len(completion.logprobs)
        assert_truthful(output, one, MODEL)
    assert [EOS in kept for kept in outputs[2].outputs[0].sampling_mask] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("stop", "include", "text", "num_tokens", "reason"),
    [
        ("IH", False, "H", 2, "IH"),
        ("IHIH", False, "H", 3, "IHIH"),
        ("IHIH", True, "HIHIH", 3, "IHIH"),
        (("X", "HI"), False, "", 1, "HI"),
        ("x", False, "HI" * 9, 9, None),
        ("HI" * 9, False, "", 9, "HI" * 9),
    ],
)
def test_stop_strings(llm, stop, include, text, num_tokens, reason):
    params = changed(allowed_token_ids=[34], stop=stop, include_stop_str_in_output=include, logprobs=1)
    outputs = llm.generate([PROMPTS[0]] * 6, [params] * 5 + [changed(seed=11)])
    for output in outputs[:5]:
        completion = output.outputs[0]
        assert (completion.text, completion.token_ids) == (text, [34] * num_tokens)
        assert completion.stop_reason == reason
        assert completion.finish_reason == ("length" if reason is None else "stop")
        assert completion.sampling_mask.token_ids == [[34]] * num_tokens
        assert len(completion.logprobs) == num_tokens
    assert_truthful(outputs[5], changed(seed=11), MODEL)


def test_requests_without_a_mask_beside_those_with_one(llm):
    """Greedy requests and those without a bound on their support opt out."""
    params = [
        changed(temperature=0.0, return_sampling_mask=False),
        changed(seed=1),
        changed(top_k=0, seed=2, return_sampling_mask=False),
        changed(seed=1, return_sampling_mask=False),
        changed(logprobs=None, seed=4),
    ]
    outputs = llm.generate([PROMPTS[1]] * 5, params)
    assert [output.outputs[0].sampling_mask is None for output in outputs] == [True, False, True, True, False]
    assert outputs[1].outputs[0].token_ids == outputs[3].outputs[0].token_ids
    assert outputs[4].outputs[0].logprobs is outputs[4].outputs[0].cumulative_logprob is None
    for output, one in zip(outputs, params, strict=True):
        assert_truthful(output, one, MODEL, has_logprobs=one.logprobs is not None)


def test_a_row_at_the_limit_of_the_model_ends(llm):
    """P78: what would not fit is cut, and the neighbours go on."""
    params = [changed(max_tokens=9, seed=13), changed(max_tokens=None, seed=12, ignore_eos=True), changed(seed=3)]
    with pytest.raises(ValueError, match=r"The decoder prompt \(length 64\) is longer than the maximum model length"):
        llm.generate([PROMPTS[0], [5] * 64], params[0])
    outputs = llm.generate([PROMPTS[0], [5] * 17, [3]], params)
    assert len(outputs[1].outputs[0].token_ids) == 64 - 17
    assert outputs[1].outputs[0].finish_reason == "length"
    for output, one in zip(outputs, params, strict=True):
        assert_truthful(output, one, MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "sampling distribution replay requires temperature > 0"),
        ({"top_k": 0}, "sampling distribution replay requires top_k > 0 to bound sampling mask size"),
        ({"logprobs": 6}, "Requested sample logprobs of 6, which is greater than max allowed: 5"),
        ({"logprobs": -1}, "Requested sample logprobs of 40, which is greater than max allowed: 5"),
        ({"prompt_logprobs": 7}, "Requested prompt logprobs of 7, which is greater than max allowed: 5"),
        ({"logit_bias": {40: 1.0}}, r"token_id\(s\) \[40\] in logit_bias contain out-of-vocab token ids"),
        ({"stop_token_ids": [-1]}, r"token_id\(s\) \[-1\] in stop_token_ids contain out-of-vocab"),
        ({"bad_words": [[99]]}, r"token_id\(s\) \[99\] in bad_words"),
    ],
)
def test_one_wrong_request_stops_the_call_before_anything_runs(llm, changes, message):
    steps = llm.engine.counters.num_steps
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[:3], [MASKED, changed(**changes), MASKED])
    assert llm.engine.counters.num_steps == steps
    assert not llm.engine.has_unfinished_requests()
    assert llm.generate([[3]], MASKED)[0].finished


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt cannot be empty"),
        ([3, 40], r"token_id\(s\) \[40\] in prompt_token_ids contain out-of-vocab token ids. Vocabulary size: 40"),
        ([-1], r"token_id\(s\) \[-1\] in prompt_token_ids"),
        ([1.5], "prompt_token_ids must contain only integers"),
        ({}, "must hold prompt or prompt_token_ids"),
        ({"text": "a"}, r"must hold prompt or prompt_token_ids, got \['text'\]"),
    ],
)
def test_wrong_prompts_are_refused(llm, unchecked, prompt, message):
    """P56 and P83."""
    with pytest.raises(ValueError, match=message):
        llm.generate([[3], prompt], MASKED)
    assert llm.generate([[3]], MASKED)[0].finished


def test_forms_of_prompts(llm):
    params = changed(seed=1, max_tokens=2)
    one = same(llm.generate([1, 3, 4], params)[0])
    for prompts in (
        "ab",
        ["ab"],
        [[1, 3, 4]],
        {"prompt": "ab"},
        [{"prompt_token_ids": [1, 3, 4], "prompt": "ab"}],
        [np.array([1, 3, 4])],
    ):
        (output,) = llm.generate(prompts, params)
        assert same(output) == one
        has_text = not isinstance(prompts, list) or isinstance(prompts[0], (str, dict))
        assert output.prompt == ("ab" if has_text else None)
    assert llm.generate([], params) == []
    with pytest.raises(ValueError, match="lengths of prompts and params must be the same, got 2 and 1"):
        llm.generate(["a", "b"], [params])


def test_chat(llm):
    messages = [{"role": "user", "content": "hi"}]
    params = changed(seed=1, max_tokens=2)
    (output,) = llm.chat(messages, params)
    assert output.prompt == "<|bos|>u:hi;a:"
    assert output.prompt_token_ids == WORDS.encode("<|bos|>u:hi;a:")
    both = llm.chat([messages, messages * 2], params, add_generation_prompt=False, chat_template_kwargs={"x": 1})
    assert [o.prompt for o in both] == ["<|bos|>u:hi;x", "<|bos|>u:hi;u:hi;x"]


def test_settings_that_the_model_recommends(llm):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7, max_tokens=5)
    (output,) = llm.generate(["ab"])
    assert_truthful(output, llm.get_default_sampling_params(), MODEL, has_logprobs=False)
    plain = LLM(MODEL, tokenizer=WORDS, generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()
    own = LLM(MODEL, generation_config={"top_p": 0.5})
    assert own.get_default_sampling_params() == SamplingParams(top_p=0.5)
    with pytest.raises(ValueError, match="must be 'auto', 'vllm' or a mapping, got 'own'"):
        LLM(MODEL, generation_config="own")


def test_a_bar_on_terminals_alone(llm, capsys):
    llm.generate([[3]] * 3, MASKED)
    assert capsys.readouterr().err == ""
    written = io.StringIO()
    llm.generate([[3]] * 3, MASKED, use_tqdm=Console(file=written, force_terminal=True, width=120))
    assert "3/3" in written.getvalue()
    assert "out" in written.getvalue()
    written = io.StringIO()
    llm.generate([[3]] * 3, MASKED, use_tqdm=Console(file=written))
    assert written.getvalue() == ""


def test_only_what_is_asked_for_is_fetched(llm):
    """Ids and counts: fewer bytes than the cells of all supports would take."""

    def fetched(**changes):
        llm.generate(PROMPTS[:4], changed(max_tokens=16, ignore_eos=True, seed=1, top_p=0.3, **changes))
        assert llm.last_stats.num_tokens == 4 * 16
        return llm.last_stats.num_bytes

    bare, with_masks = fetched(return_sampling_mask=False, logprobs=None), fetched(logprobs=None)
    num_cells = 4 * 16 * 16
    assert bare + 4 * 4 * 16 < with_masks < bare + 4 * num_cells / 2
    assert fetched() > with_masks


def test_a_buffer_of_the_caller_may_be_used_again(llm):
    """P76."""
    params = changed(seed=3)
    expected = same(llm.generate([PROMPTS[5]], params)[0])
    buffer = np.array(PROMPTS[5])
    llm.engine.add_request("mine", buffer, params)
    buffer[:] = 7
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
        buffer[:] = 8
    assert [same(output) for output in outputs] == [expected]


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, MIXED)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.num_running == llm.engine.num_waiting == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"return_sampling_mask": True}, "requires logprobs_mode='processed_logprobs'"),
        ({"logprobs_mode": "logits"}, "logprobs_mode must be one of"),
        ({"max_model_len": 65}, r"max_model_len must be in \[2, 64\]"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_logprobs": -2}, "max_logprobs must be non-negative or -1, got -2"),
        ({"speculative_config": {"method": "eagle"}}, "must have the method 'ngram', or 'draft_model'"),
        ({"speculative_config": {"method": "ngram", "k": 3}}, r"must hold method, .*, got \['k'\]"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 4}}, "min_ngram must be in"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(MODEL, **settings)


def test_a_model_without_a_tokenizer():
    plain = LLM(MODEL)
    for changes, message in (
        ({"stop": "a"}, "stop strings are only supported when detokenize is True"),
        ({"bad_words": ["a"]}, "bad_words"),
    ):
        with pytest.raises(ValueError, match=message):
            plain.generate([[3]], SamplingParams(**changes))
    with pytest.raises(ValueError, match="need a tokenizer"):
        plain.generate("a")
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        plain.chat([{"role": "user", "content": "a"}])
    assert plain.get_tokenizer() is None


def test_the_public_name():
    assert serve.LLM is LLM
