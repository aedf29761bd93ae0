"""What vLLM, SGLang, prime-rl and Miles hold becomes the rollout that its lists are, or is refused by name.

`vllm_edited.jsonl` holds real exchanges with vLLM 0.32 (tests/data/make_vllm_tiny.py).
"""

import base64
import copy
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from jaxmask import (
    Finish,
    Replay,
    SamplingParams,
    rollout_from_lists,
    rollout_from_miles,
    rollout_from_prime_rl,
    rollout_from_sglang,
    rollout_from_vllm,
    support_scores,
)
from jaxmask.audit import files

ROOT = Path(__file__).parents[1]
TINY = ROOT / "demos" / "interop" / "vllm_tiny"
EDITED = ROOT / "tests" / "data" / "vllm_edited.jsonl"
V = 12


def exchanges(path):
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [one["request"] for one in read], [one.get("response") or one["stream"] for one in read]


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_learner_gives_the_log_probabilities_of_vllm():
    """Real ones: with penalties, a bias, allowed ids, min-p, a stop id, and of a stream too.

    Plain ones, through a whole step: test_interop_examples.py.
    """
    rollout = rollout_from_vllm(*exchanges(EDITED), vocab_size=512)
    decoder, _ = models.load(TINY)
    G, S, T = rollout.group_size, rollout.prompt_ids.shape[1], rollout.token_ids.shape[1]
    prompts, starts = (np.repeat(np.asarray(a), G, axis=0) for a in (rollout.prompt_ids, rollout.prompt_lengths))
    rows = np.zeros((len(starts), S + T), np.int32)
    for row, start in enumerate(starts):
        rows[row, : start + T] = [*prompts[row, :start], *np.asarray(rollout.token_ids[row])]
    hidden = decoder.hidden(jnp.asarray(rows))
    places = np.arange(T) + starts[:, None] - 1
    scores = support_scores(
        jnp.take_along_axis(hidden, jnp.asarray(places)[..., None], axis=1),
        decoder.head,
        rollout.support,
        rollout.token_ids,
        temperature=jnp.broadcast_to(rollout.sampling.temperature[:, None], rollout.token_ids.shape),
        replay=Replay.of(rollout),
        loss_mask=rollout.loss_mask,
    )
    assert rollout.loss_mask.sum() > 300
    error = np.abs(np.where(rollout.loss_mask, scores.logprobs - rollout.logprobs, 0.0)).max()
    assert error < 2e-5, error


def test_rows_and_settings_of_real_answers():
    requests, responses = exchanges(EDITED)
    rollout = rollout_from_vllm(requests, responses, vocab_size=512)
    assert rollout.group_size == 4
    assert rollout.prompt_ids[2].tolist() == requests[2]["token_ids"]
    choice = responses[2]["choices"][3]
    length = len(choice["token_ids"])
    assert (
        rollout.lengths.tolist() == [20] * 9 + [len(responses[2]["choices"][1]["token_ids"])] + [20, length] + [20] * 4
    )
    assert rollout.token_ids[11, :length].tolist() == choice["token_ids"]
    assert [ids for ids in rollout.support.to_lists()[11] if ids] == choice["sampling_mask"]
    # Rows 9 and 11 ended with a stop id.
    assert [row for row, code in enumerate(rollout.finish) if code == Finish.STOP] == [9, 11]
    assert rollout.sampling.temperature.tolist() == pytest.approx([0.9] * 4 + [1.3] * 4 + [0.9] * 4 + [0.6] * 4)
    streamed = [event for event in responses[3] if event != "[DONE]"]
    pieces = [choice for event in streamed for choice in event["choices"] if choice["index"] == 2]
    assert len(pieces) > 5
    assert rollout.token_ids[14].tolist() == [token for piece in pieces for token in piece["token_ids"]]


# Two prompts with two completions each, as `rollout_from_lists` takes them.
PROMPTS = [[1, 3], [4]]
COMPLETIONS = [[5, 6, 2], [7, 9], [10, 11], [3]]
LOGPROBS = [[-0.5, 0.0, -0.25], [-1.0, -0.5], [0.0, -0.125], [-3.0]]
SUPPORTS = [[[5, 6], [6], [0, 2]], [[1, 3, 7], [9, 11]], [[10], [10, 11]], [[0, 3, 8]]]
SHAPES = {"vocab_size": V, "group_size": 2, "width": 4, "max_length": 3, "eos_token_ids": [2]}


def expected(*, temperature=0.5, versions=None, **settings):
    return rollout_from_lists(
        PROMPTS,
        COMPLETIONS,
        LOGPROBS,
        SUPPORTS,
        params=SamplingParams(temperature=temperature, max_tokens=None, **settings),
        policy_versions=versions,
        **SHAPES,
    )


def of_vllm():
    """A request for each prompt; choices in no order."""
    requests, responses = [], []
    for group, prompt in enumerate(PROMPTS):
        requests.append({"token_ids": prompt, "sampling_params": {"temperature": 0.5, "n": 2, "top_k": 3}})
        choices = [
            {
                "index": index,
                "token_ids": COMPLETIONS[row],
                "sampling_mask": SUPPORTS[row],
                "logprobs": {"content": [{"logprob": value} for value in LOGPROBS[row]]},
                "weight_versions": [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 9}],
            }
            for index, row in enumerate((2 * group, 2 * group + 1))
        ]
        responses.append({"choices": choices[::-1]})
    return requests, responses


def of_sglang():
    """A request for each completion."""
    requests, responses = [], []
    for row, token_ids in enumerate(COMPLETIONS):
        requests.append({"input_ids": PROMPTS[row // 2], "sampling_params": {"temperature": 0.5, "top_k": 3}})
        told = {"output_token_sampling_mask": SUPPORTS[row], "output_token_sampling_logprobs": LOGPROBS[row]}
        responses.append({"output_ids": token_ids, "meta_info": {**told, "weight_version": "7"}})
    return requests, responses


def of_prime_rl():
    samples = []
    for row, token_ids in enumerate(COMPLETIONS):
        before = len(PROMPTS[row // 2])
        length = before + len(token_ids)
        mask = {
            "ids": np.concatenate(SUPPORTS[row]).astype("<i4").tobytes(),
            "counts": np.array([0] * before + [len(ids) for ids in SUPPORTS[row]], "<i4").tobytes(),
        }
        samples.append(
            {
                "token_ids": PROMPTS[row // 2] + token_ids,
                "mask": [False] * before + [True] * len(token_ids),
                "logprobs": [0.0] * before + LOGPROBS[row],
                "temperatures": [0.5] * length,
                "sampling_mask": mask,
            }
        )
    return samples


def of_miles():
    return {
        "tokens": [PROMPTS[row // 2] + token_ids for row, token_ids in enumerate(COMPLETIONS)],
        "response_lengths": [len(token_ids) for token_ids in COMPLETIONS],
        "loss_masks": [[1] * len(token_ids) for token_ids in COMPLETIONS],
        "rollout_log_probs": [np.array(values, np.float32) for values in LOGPROBS],
        "rollout_sampling_mask_ids": [np.concatenate(ids).astype(np.int32) for ids in SUPPORTS],
        "rollout_sampling_mask_offsets": [np.cumsum([0, *map(len, supports)]) for supports in SUPPORTS],
    }


def test_every_form_gives_the_same_rollout():
    no_group = {name: value for name, value in SHAPES.items() if name != "group_size"}
    spans = [[7, 8, 8][: len(token_ids)] for token_ids in COMPLETIONS]
    assert_equal(rollout_from_vllm(*of_vllm(), **no_group), expected(top_k=3, versions=spans))
    sevens = [[7] * len(token_ids) for token_ids in COMPLETIONS]
    assert_equal(rollout_from_sglang(*of_sglang(), **SHAPES), expected(top_k=3, versions=sevens))
    assert_equal(rollout_from_prime_rl(of_prime_rl(), **SHAPES), expected())
    assert_equal(rollout_from_miles(of_miles(), temperature=0.5, **SHAPES), expected())


def test_sglang_sends_several_completions_as_a_list_and_the_log_probability_of_each_id():
    requests, responses = of_sglang()
    told = responses[1]["meta_info"]
    told["output_token_sampling_logprobs"] = [[-2.0, -3.0, -1.0], [-0.5, -0.9]]
    two = [responses[:2], responses[2:]]
    found = rollout_from_sglang(requests[::2], two, **{**SHAPES, "group_size": None})
    assert_equal(found, rollout_from_sglang(*of_sglang(), **SHAPES))


def test_tokens_of_others_are_context():
    """A tool's answer at positions 1 and 2 of the first row: of single ids in Miles, without a support in prime-rl."""
    batch = of_miles()
    batch["loss_masks"][0] = [1, 0, 1]
    rollout = rollout_from_miles(batch, temperature=0.5, **SHAPES)
    assert rollout.loss_mask[0].tolist() == [True, False, True]
    samples = of_prime_rl()
    samples[0]["mask"] = [False, False, True, False, True]
    counts, ids = np.array([0, 0, 2, 0, 2], "<i4"), np.array([5, 6, 0, 2], "<i4")
    samples[0]["sampling_mask"] = {"ids": ids, "counts": counts}
    assert_equal(rollout_from_prime_rl(samples, **SHAPES), rollout)


def test_weights_with_names_have_no_versions():
    requests, responses = of_vllm()
    for response in responses:
        for choice in response["choices"]:
            choice["weight_versions"] = [{"version": "default", "start": 0, "end": 3}]
    no_group = {name: value for name, value in SHAPES.items() if name != "group_size"}
    assert rollout_from_vllm(requests, responses, **no_group).policy_versions is None


def put(holder, path, value):
    for step in path[:-1]:
        holder = holder[step]
    if value is REMOVED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value


REMOVED = object()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("form", "path", "value", "message"),
    [
        ("vllm", (1, 0), {"error": {"message": "no"}}, "response 0 is an error: {'message': 'no'}."),
        ("vllm", (1, 0), "no", "response 0 must be a JSON object with 'choices', got str."),
        ("vllm", (1, 1), {"choices": []}, "responses must hold equally many completions, at least one, got [0, 2]."),
        ("vllm", (1, 1, "choices", 0, "index"), 0, "choices of response 1 must have the indices 0 to 1, got [0, 0]."),
        (
            "vllm",
            (1, 1, "choices", 0, "sampling_mask"),
            None,
            "response 1, choice 0 has no 'sampling_mask': start vLLM with --return-sampling-mask.",
        ),
        (
            "vllm",
            (1, 0, "choices", 1, "logprobs"),
            REMOVED,
            "response 0, choice 1 has no 'logprobs': ask with logprobs=0.",
        ),
        (
            "vllm",
            (1, 0, "choices", 1, "logprobs", "content", 2, "logprob"),
            -9999.0,
            "row 0, position 2: logprob must be a finite number of at most 0.001, got None.",
        ),
        (
            "vllm",
            (1, 1, "choices", 1, "sampling_mask", 1),
            [10],
            "row 2, position 1: sampled id 11 lies outside its support [10].",
        ),
        (
            "vllm",
            (1, 0, "choices", 0, "sampling_mask"),
            [[1, 3, 7]],
            "row 1: supports must have one entry per token of the completion, 2, got 1.",
        ),
        ("vllm", (0, 1, "sampling_params"), REMOVED, "request 1 has no 'sampling_params'."),
        (
            "vllm",
            (0, 1, "sampling_params", "top_p"),
            0.0,
            "request 1: top_p must be in (0, 1], got 0.0.",
        ),
        ("vllm", (0,), [], "requests and responses must be as many, got 0 and 2."),
        (
            "sglang",
            (0, 2, "sampling_params", "temperature"),
            REMOVED,
            "'sampling_params' of request 2 has no 'temperature'.",
        ),
        (
            "sglang",
            (0, 2, "sampling_params", "repetition_penalty"),
            1.1,
            "request 2 was sampled with repetition_penalty=1.1, which cannot be replayed.",
        ),
        (
            "sglang",
            (1, 1, "meta_info", "output_token_sampling_mask"),
            REMOVED,
            "'meta_info' of response 1, completion 0 has no 'output_token_sampling_mask': "
            "ask with return_sampling_mask.",
        ),
        ("sglang", (0, 1, "input_ids"), [1], "row 1 has another prompt than row 0, with which it shares a group."),
        (
            "sglang",
            (1, 0, "meta_info", "output_token_sampling_logprobs"),
            [[-0.5, -1.0], [0.0], [-1.0]],
            "response 0, completion 0, position 2: a support and its log-probabilities must be equally long.",
        ),
        ("prime-rl", (1, "mask"), [False], "'mask' of sample 1 must have one entry for each token, 4, got 1."),
        ("prime-rl", (1, "mask"), [False] * 4, "sample 1 has no sampled token."),
        (
            "prime-rl",
            (1, "temperatures", 3),
            0.75,
            "sample 1 was sampled at several temperatures, [0.5, 0.75]: a row has one.",
        ),
        (
            "prime-rl",
            (1, "sampling_mask"),
            None,
            "sample 1 has no 'sampling_mask': prime-rl keeps it where top_p or top_k truncates.",
        ),
        ("prime-rl", (1, "sampling_mask", "ids"), b"123", "ids of sample 1 must be bytes of int32, got 3 of them."),
        (
            "prime-rl",
            (1, "sampling_mask", "counts"),
            [0, 0, 5],
            "'counts' of sample 1 must have one entry for each token, 4, got 3.",
        ),
        ("miles", ("response_lengths", 1), 4, "'response_lengths' of sample 1 must be in [0, 4), got 4."),
        ("miles", ("loss_masks",), [[1] * 3], "'loss_masks' of the batch must have an entry for each sample, got 1."),
        ("miles", ("loss_masks", 1), [1], "'loss_masks' of sample 1 must have one entry for each token, 2, got 1."),
        (
            "miles",
            ("rollout_sampling_mask_offsets", 1),
            [0, 3, 4],
            "sample 1: offsets must end at the number of token_ids, 5, got 4.",
        ),
        ("miles", ("loss_masks", 1), [2, 1], "row 1, position 0: loss_mask must be True or False, got 2."),
    ],
)
def test_what_is_missing_or_wrong_is_named(form, path, value, message):
    no_group = {name: size for name, size in SHAPES.items() if name != "group_size"}
    make, read = {
        "vllm": (of_vllm, lambda given: rollout_from_vllm(*given, **no_group)),
        "sglang": (of_sglang, lambda given: rollout_from_sglang(*given, **SHAPES)),
        "prime-rl": (of_prime_rl, lambda given: rollout_from_prime_rl(given, **SHAPES)),
        "miles": (of_miles, lambda given: rollout_from_miles(given, temperature=0.5, **SHAPES)),
    }[form]
    given = copy.deepcopy(make())
    given = list(given) if isinstance(given, tuple) else given
    put(given, path, value)
    with pytest.raises(ValueError) as error:
        read(given)
    assert str(error.value) == message


def as_json(value):
    """Arrays as lists, and bytes as prime-rl's records have them in JSON."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: as_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def lines_of(form):
    """The lines of a file of each form, and the rollout that the strict reader makes of the same values."""
    if form == "vllm":
        requests, responses = exchanges(EDITED)
        found = rollout_from_vllm(requests, responses, vocab_size=512)
        return EDITED.read_text().splitlines(), found
    if form == "sglang":
        requests, responses = of_sglang()
        pairs = zip(requests, responses, strict=True)
        lines = [{"request": request, "status": 200, "response": response} for request, response in pairs]
        return [json.dumps(line) for line in lines], rollout_from_sglang(requests, responses, **SHAPES)
    if form == "prime-rl":
        return [json.dumps(as_json(one)) for one in of_prime_rl()], rollout_from_prime_rl(of_prime_rl(), **SHAPES)
    return [json.dumps(as_json(of_miles()))], rollout_from_miles(of_miles(), temperature=0.5, **SHAPES)


@pytest.mark.parametrize("form", ["vllm", "sglang", "prime-rl", "miles"])
def test_an_audit_reads_the_same_rows(form, tmp_path):
    """Two readers of each form, a strict one and one that takes anything: what is whole, they see alike."""
    lines, rollout = lines_of(form)
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    (rows,) = files.read(tmp_path / "rollouts.jsonl")
    is_token = np.asarray(rollout.token_mask)
    assert rows.malformed == ()
    assert rows.lengths.tolist() == rollout.lengths.tolist()
    assert rows.token_ids.tolist() == np.asarray(rollout.token_ids)[is_token].tolist()
    np.testing.assert_array_equal(rows.logprobs.astype(np.float32), np.asarray(rollout.logprobs)[is_token])
    supports = np.split(rows.support_ids, np.cumsum(rows.support_sizes)[:-1])
    expected_supports = [ids for row in rollout.support.to_lists() for ids in row if ids]
    assert [sorted(ids.tolist()) for ids in supports] == expected_supports
    assert rows.trains.tolist() == np.asarray(rollout.loss_mask)[is_token].tolist()
