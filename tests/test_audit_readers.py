"""What each reader makes of values that are not of the kind they should be: named, and in nobody's way."""

import copy
import json
import math
import random

import numpy as np
import pytest
from rollout_files import (
    VARIANTS,
    base64_of,
    good_rows,
    miles_sample,
    prime_rl_sample,
    sglang_answer,
    vllm_choice,
    write_lines,
)
from test_audit_files import check_shapes, read_whole

from jaxmask.audit import files

ROW = good_rows(1, 1, 6)[0]
HUGE = 10**30


def vllm(**changes):
    return {"choices": [vllm_choice(ROW) | changes]}


def at(values, position, value):
    changed = copy.deepcopy(values)
    changed[position] = value
    return changed


def content(position, value):
    entries = vllm_choice(ROW)["logprobs"]["content"]
    entries[position] |= {"logprob": value}
    return {"content": entries}


ENTRIES = vllm_choice(ROW)["logprobs"]["content"]
# What stands in a choice, and what is said of it: position, field and a word.
WRONG_IN_A_CHOICE = {
    "a token that is null": (vllm(token_ids=at(ROW.token_ids, 2, None)), 2, "token_ids", "None"),
    "a token that is true": (vllm(token_ids=at(ROW.token_ids, 2, True)), 2, "token_ids", "True"),
    "a token that is a float": (vllm(token_ids=at(ROW.token_ids, 2, 3.0)), 2, "token_ids", "3.0"),
    "a token that is text": (vllm(token_ids=at(ROW.token_ids, 2, "7")), 2, "token_ids", "'7'"),
    "a token that is huge": (vllm(token_ids=at(ROW.token_ids, 2, HUGE)), 2, "token_ids", "64 bits"),
    "a token that is NaN": (vllm(token_ids=at(ROW.token_ids, 2, math.nan)), 2, "token_ids", "nan"),
    "tokens that are text": (vllm(token_ids="abc"), -1, "token_ids", "'abc'"),
    "a support that is a number": (vllm(sampling_mask=at(ROW.supports, 1, 5)), 1, "sampling_mask", "5"),
    "an id that is null": (vllm(sampling_mask=at(ROW.supports, 1, [1, None])), 1, "sampling_mask", "None"),
    "an id that is a list": (vllm(sampling_mask=at(ROW.supports, 1, [[1]])), 1, "sampling_mask", "[1]"),
    "an id that is a float": (vllm(sampling_mask=at(ROW.supports, 1, [3.0])), 1, "sampling_mask", "3.0"),
    "an id that is huge": (vllm(sampling_mask=at(ROW.supports, 1, [-HUGE])), 1, "sampling_mask", "64 bits"),
    "supports that are text": (vllm(sampling_mask="abc"), -1, "sampling_mask", "'abc'"),
    "supports that are an object": (
        vllm(sampling_mask={"offsets": 1, "token_ids": ""}),
        -1,
        "sampling_mask.offsets",
        "base64",
    ),
    "no base64": (vllm(sampling_mask={"offsets": "????", "token_ids": ""}), -1, "sampling_mask.offsets", "base64"),
    "half an integer": (
        vllm(sampling_mask={"offsets": base64_of([1, 2], "<i1"), "token_ids": ""}),
        -1,
        "sampling_mask.offsets",
        "2 bytes",
    ),
    "a log-probability that is text": (vllm(logprobs=content(3, "-1")), 3, "logprobs", "'-1'"),
    "a log-probability that is true": (vllm(logprobs=content(3, True)), 3, "logprobs", "True"),
    "a log-probability that is huge": (vllm(logprobs=content(3, 10**400)), 3, "logprobs", "1000"),
    "a log-probability of another token": (
        vllm(logprobs={"content": at(ENTRIES, 3, ENTRIES[3] | {"token_id": -5})}),
        3,
        "logprobs",
        "that of token -5",
    ),
    "an entry that is text": (vllm(logprobs={"content": at(ENTRIES, 3, "x")}), 3, "logprobs", "'x'"),
    "entries that are text": (vllm(logprobs={"content": "x"}), -1, "logprobs", "'x'"),
    "log-probabilities that are a number": (vllm(logprobs=3), -1, "logprobs", "3"),
    "fewer numbers than ids": (
        vllm(sampling_mask_logprobs=at(ROW.kept_logprobs, 4, [0.0] * 99)),
        4,
        "sampling_mask_logprobs",
        "99 numbers",
    ),
    "an error at the end": (vllm(error={"message": "gone"}), -1, "error", "gone"),
}


@pytest.mark.parametrize("case", WRONG_IN_A_CHOICE.values(), ids=WRONG_IN_A_CHOICE)
def test_what_is_wrong_in_a_choice_is_named(tmp_path, case):
    record, position, field, word = case
    write_lines(tmp_path / "a.jsonl", [vllm(), record, vllm()])
    rows = read_whole(tmp_path / "a.jsonl")
    (malformed,) = rows.malformed
    assert (malformed.row, malformed.position, malformed.field) == (1, position, field)
    assert word in malformed.text
    # The rows beside it are whole.
    assert rows.token_ids[: len(ROW.token_ids)].tolist() == rows.token_ids[-len(ROW.token_ids) :].tolist()
    assert rows.lengths[[0, 2]].tolist() == [len(ROW.token_ids)] * 2


def test_what_fits_into_the_arrays_is_no_matter_of_kind(tmp_path):
    """Too few or too many supports, numbers out of range, NaN and null: for the checks to look at."""
    values = [math.nan, -math.inf, None, -9999.0, 0, 2.5]
    choice = vllm(logprobs={"token_logprobs": values}, sampling_mask=[[1, 1], [], None, [-4]])
    write_lines(tmp_path / "a.jsonl", [choice, vllm(sampling_mask=[[7]] * 9), vllm(sampling_mask=None, logprobs=None)])
    rows = read_whole(tmp_path / "a.jsonl")
    assert rows.malformed == ()
    assert rows.num_supports.tolist() == [4, 9, -1]
    assert rows.num_logprobs.tolist() == [6, 6, -1]
    assert rows.support_sizes[:6].tolist() == [2, 0, -1, 1, -1, -1]
    assert rows.support_sizes[6:12].tolist() == [1] * 6
    assert rows.support_ids[:3].tolist() == [1, 1, -4]
    assert rows.has_logprob[:6].tolist() == [True, True, False, True, True, True]
    np.testing.assert_array_equal(rows.logprobs[:6], [math.nan, -math.inf, math.nan, -9999.0, 0.0, 2.5])


def test_a_bad_id_keeps_its_place(tmp_path):
    record = vllm(token_ids=at(ROW.token_ids, 1, None), sampling_mask=at(ROW.supports, 1, [3, "4", 5]))
    write_lines(tmp_path / "a.jsonl", [record])
    rows = read_whole(tmp_path / "a.jsonl")
    assert rows.token_ids[1] == -1
    assert rows.support_sizes[1] == 3
    assert rows.support_ids[rows.token_of_id == 1].tolist() == [3, -1, 5]


WRONG_CUTS = {
    "do not start at 0": ([1, 2, 2, 2, 2, 2, 5], -1, "start with"),
    "fall": ([0, 2, 1, 2, 3, 4, 5], 1, "fall from 2 to 1"),
    "end early": ([0, 1, 2, 3, 4, 4, 4], -1, "end with 4, and there are 5 ids"),
    "are none": ([], -1, "start with []"),
    "are huge": ([0, 1, 2, 3, 4, 5, HUGE], 6, "64 bits"),
}


@pytest.mark.parametrize("case", WRONG_CUTS.values(), ids=WRONG_CUTS)
def test_offsets_that_cut_nothing(tmp_path, case):
    offsets, position, word = case
    mask = {"rollout_sampling_mask_ids": [1, 2, 3, 4, 5], "rollout_sampling_mask_offsets": offsets}
    sample = miles_sample(ROW, 0) | mask
    del sample["rollout_sampling_mask_log_probs"]
    write_lines(tmp_path / "a.jsonl", [sample])
    rows = read_whole(tmp_path / "a.jsonl")
    malformed = rows.malformed[0]
    assert (malformed.position, malformed.field) == (position, "rollout_sampling_mask offsets")
    assert word in malformed.text
    assert (rows.support_sizes == -1).all()


@pytest.mark.parametrize(
    ("counts", "word"), [([1, -1, 5, 0, 0, 0], "a count is -1"), ([1] * 6, "add up to 6"), ([2**62] * 6, "a count is")]
)
def test_counts_that_cut_nothing(tmp_path, counts, word):
    sample = prime_rl_sample(ROW)
    sample["sampling_mask"] = {"ids": [1, 2, 3, 4, 5], "counts": [0] * len(ROW.prompt_ids) + counts}
    write_lines(tmp_path / "a.jsonl", [sample])
    (malformed,) = read_whole(tmp_path / "a.jsonl").malformed
    assert malformed.field == "sampling_mask counts"
    assert word in malformed.text


@pytest.mark.parametrize(
    ("mask", "position", "word"), [([1, 0, 2, 1, 1, 1], 2, "2"), ([1] * 5, -1, "5 entries"), ("x", -1, "'x'")]
)
def test_a_loss_mask_that_is_none(tmp_path, mask, position, word):
    write_lines(tmp_path / "a.jsonl", [miles_sample(ROW, 0) | {"loss_mask": mask}])
    rows = read_whole(tmp_path / "a.jsonl")
    (malformed,) = rows.malformed
    assert (malformed.field, malformed.position) == ("loss_mask", position)
    assert word in malformed.text
    # What is not known to be left out is looked at.
    assert rows.trains[2]
    assert rows.trains[5]


@pytest.mark.parametrize("length", [None, -1, 7_000, "6", 6.0, True])
def test_a_length_of_a_response_that_is_none(tmp_path, length):
    write_lines(tmp_path / "a.jsonl", [miles_sample(ROW, 0) | {"response_length": length}])
    assert read_whole(tmp_path / "a.jsonl").malformed[0].field == "response_length"


@pytest.mark.parametrize("triples", [[None] * 6, [[-1.0]] * 6, "abc", 7, [[-1.0, 2, None]] * 5])
def test_triples_that_are_none(tmp_path, triples):
    answer = sglang_answer(ROW)
    answer["meta_info"]["output_token_logprobs"] = triples
    write_lines(tmp_path / "a.jsonl", [answer, sglang_answer(ROW)])
    rows = read_whole(tmp_path / "a.jsonl")
    assert rows.full_logprobs[6:].tolist() == ROW.full_logprobs
    assert rows.logprobs[:6].tolist() == ROW.logprobs


def test_numbers_beside_ids_give_the_drawn_ones(tmp_path):
    answer = sglang_answer(ROW)
    answer["meta_info"]["output_token_sampling_logprobs"] = at(ROW.kept_logprobs, 2, [])
    write_lines(tmp_path / "a.jsonl", [answer])
    rows = read_whole(tmp_path / "a.jsonl")
    assert rows.has_logprob.tolist() == [True, True, False, True, True, True]
    assert rows.logprobs[3:].tolist() == ROW.logprobs[3:]
    assert np.isnan(rows.kept_logprobs[rows.token_of_id == 2]).all()


def test_settings_of_the_wrong_kind(tmp_path):
    params = {"temperature": "hot", "top_k": 5.0, "top_p": True, "min_p": HUGE}
    records = [{"request": {"sampling_params": given}, "response": vllm()} for given in (params, "x")]
    write_lines(tmp_path / "a.jsonl", records)
    found = [(malformed.row, malformed.field) for malformed in read_whole(tmp_path / "a.jsonl").malformed]
    names = [(0, f"sampling_params.{name}") for name in ("temperature", "top_k", "top_p", "min_p")]
    assert found == [*names, (1, "sampling_params")]


ODD = (None, True, 3.0, -1, "x", [], {}, HUGE, math.nan, -math.inf, [[]], [None], {"a": 1}, [[[1]]], 10**400, "AAAA")


def with_something_odd(value, source):
    """A copy with one thing in it replaced, or left out, or doubled."""
    if isinstance(value, (dict, list)) and value and source.random() > 0.12:
        changed = copy.copy(value)
        key = source.choice(list(value)) if isinstance(value, dict) else source.randrange(len(value))
        action = source.random()
        if action < 0.06:
            del changed[key]
        elif action < 0.1 and isinstance(value, list):
            changed.insert(key, value[key])
        else:
            changed[key] = with_something_odd(value[key], source)
        return changed
    return source.choice(ODD)


@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name].suffix == ".jsonl"])
def test_no_json_makes_a_reader_fail(tmp_path, name):
    """A few hundred files with something odd anywhere in them, seeded."""
    variant, source = VARIANTS[name], random.Random(name)
    path = tmp_path / "a.jsonl"
    variant.write(path, good_rows(1, 2, 5))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    odd = []
    for _ in range(150):
        changed = with_something_odd(records, source)
        odd += changed if isinstance(changed, list) else [changed]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, *odd, *records]))
    blocks = list(files.read(path, form=variant.form))
    for rows in blocks:
        check_shapes(rows)
    assert sum(len(rows.malformed) for rows in blocks) > 40
    # What stands behind all that is whole again.
    assert blocks[-1].token_ids[-5:].tolist() == read_whole_again(tmp_path, variant).token_ids[-5:].tolist()


def read_whole_again(folder, variant):
    path = folder / f"good{variant.suffix}"
    variant.write(path, good_rows(1, 2, 5))
    return read_whole(path)


@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name].suffix == ".npz"])
def test_no_archive_makes_a_reader_fail(tmp_path, name):
    """Arrays of other kinds and shapes, then bytes that are others, seeded."""
    variant, source = VARIANTS[name], random.Random(name)
    path = tmp_path / "a.npz"
    variant.write(path, good_rows(1, 2, 5))
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    data = path.read_bytes()
    for key, array in arrays.items():
        for odd in (array[..., None], array[:-1] if array.ndim else array - 2, array.astype("U9"), np.float64(np.nan)):
            np.savez(path, **(arrays | {key: odd}))
            read_or_refuse(path)
        np.savez(path, **{other: arrays[other] for other in arrays if other != key})
        read_or_refuse(path)
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(source.randint(1, 5)):
            changed[source.randrange(len(changed))] = source.randrange(256)
        path.write_bytes(changed[: source.choice([len(changed), source.randrange(4, len(changed))])])
        read_or_refuse(path)


def read_or_refuse(path):
    try:
        for rows in files.read(path):
            check_shapes(rows)
    except files.UnreadableError:
        return


def fields_of(tmp_path, *records):
    path = tmp_path / "answers.jsonl"
    write_lines(path, records)
    return {one.field: one.text for one in read_whole(path).malformed}


def test_settings_out_of_their_ranges_are_named(tmp_path):
    params = {"temperature": math.nan, "top_p": 7.0, "min_p": -0.1, "top_k": -2}
    found = fields_of(tmp_path, {"request": {"sampling_params": params}, "response": vllm()})
    assert found == {f"sampling_params.{name}": f"{value} is outside of its range" for name, value in params.items()}
    edges = {"temperature": 0, "top_p": 1, "min_p": 1, "top_k": -1}
    assert fields_of(tmp_path, {"request": {"sampling_params": edges}, "response": vllm()}) == {}


def test_tokens_that_an_answer_counts_and_does_not_hold_are_missed(tmp_path):
    counted = vllm() | {"usage": {"completion_tokens": 6}}
    assert fields_of(tmp_path, counted) == {}
    found = fields_of(tmp_path, counted | {"usage": {"completion_tokens": 9}})
    assert found == {"usage": "completion_tokens are 9, and the choices hold 6"}
    # The answer stands in the file, and nothing of it in the rollouts.
    assert fields_of(tmp_path, vllm(), {"choices": []}) == {"choices": "the answer has none"}


def test_triples_of_other_tokens_are_named(tmp_path):
    answer = sglang_answer(ROW)
    assert fields_of(tmp_path, answer) == {}
    answer["meta_info"]["output_token_logprobs"][2][1] += 1
    token = ROW.token_ids[2]
    assert fields_of(tmp_path, answer) == {
        "logprobs": f"the log-probability is that of token {token + 1}, and the token is {token}"
    }
