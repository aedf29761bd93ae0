"""Every form of rollouts reads back to the same rows, and no file makes a reader fail."""

import dataclasses
import functools
import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from rollout_files import (
    VARIANTS,
    good_rows,
    miles_sample,
    prime_rl_sample,
    rollout_arrays,
    sglang_answer,
    vllm_choice,
    vllm_records,
    write_lines,
)

from jaxmask.audit import archives, files
from jaxmask.audit.builder import BLOCK_TOKENS, RowsBuilder
from jaxmask.audit.completion import Completion
from jaxmask.audit.rows import Rows, Setting

DATA = Path(__file__).parent / "data"
ROWS = good_rows()


def read_whole(path: Path, form: str = "auto") -> Rows:
    """The only block of a small file."""
    (rows,) = files.read(path, form=form)
    check_shapes(rows)
    return rows


def check_shapes(rows: Rows) -> None:
    """The arrays of a block fit together, whatever the file held."""
    num_rows, num_tokens, num_ids = len(rows.names), rows.lengths.sum(), np.maximum(rows.support_sizes, 0).sum()
    per_row = (rows.settings, rows.lengths, rows.num_supports, rows.num_logprobs, rows.groups)
    assert [len(part) for part in per_row] == [num_rows] * 5
    per_token = (rows.token_ids, rows.trains, rows.support_sizes, rows.logprobs, rows.has_logprob, rows.positions)
    assert [len(part) for part in per_token] == [num_tokens] * 6
    assert len(rows.support_ids) == num_ids == len(rows.token_of_id)
    assert rows.full_logprobs is None or len(rows.full_logprobs) == num_tokens
    assert rows.kept_logprobs is None or len(rows.kept_logprobs) == num_ids
    assert rows.logits is None or len(rows.logits) == num_tokens
    for malformed in rows.malformed:
        assert 0 <= malformed.row < num_rows
        assert malformed.position >= -1
        assert malformed.text


def flat(parts):
    return [value for part in parts for value in part]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_good_file_reads_back(tmp_path, variant):
    path = tmp_path / f"rollouts{variant.suffix}"
    variant.write(path, ROWS)
    assert files.detect(path) == variant.form
    rows = read_whole(path)
    lengths = [len(row.token_ids) for row in ROWS]
    assert rows.malformed == ()
    assert len(set(rows.names)) == len(ROWS)
    assert all(name.startswith(path.name) for name in rows.names)
    for part in (rows.lengths, rows.num_supports, rows.num_logprobs):
        assert part.tolist() == lengths
    assert rows.token_ids.tolist() == flat(row.token_ids for row in ROWS)
    assert rows.support_sizes.tolist() == [len(support) for row in ROWS for support in row.supports]
    assert rows.support_ids.tolist() == flat(flat(row.supports) for row in ROWS)
    assert rows.logprobs.tolist() == flat(row.logprobs for row in ROWS)
    assert rows.has_logprob.all()
    assert rows.trains.all()
    assert rows.num_bytes > 0
    settings = Setting(0.8, 24, 0.9, 0.002) if variant.has_settings else Setting()
    if variant.has_settings and variant.form == "vllm":
        settings = dataclasses.replace(settings, asks_for_logprobs=True)
    if variant.form == "prime-rl":
        settings = Setting(temperature=0.8)
    assert rows.settings == (settings,) * len(ROWS)
    no_groups = 0 if variant.form == "answer" else -1
    assert rows.groups.tolist() == ([0, 0, 1, 1, 2, 2] if variant.has_groups else [no_groups] * len(ROWS))
    full, kept = flat(row.full_logprobs for row in ROWS), flat(flat(row.kept_logprobs) for row in ROWS)
    assert (rows.full_logprobs is None, rows.kept_logprobs is None) == (not variant.has_full, not variant.has_kept)
    assert not variant.has_full or rows.full_logprobs.tolist() == full
    assert not variant.has_kept or rows.kept_logprobs.tolist() == kept
    assert (rows.logits is None) is not variant.has_logits
    assert not variant.has_logits or np.array_equal(rows.logits, np.concatenate([row.logits for row in ROWS]))


def test_real_answers_of_vllm():
    """Some are streamed, some have several choices, some were refused."""
    reading = files.read(DATA / "vllm_responses_tiny.jsonl")
    (rows,) = reading
    assert (reading.form, reading.num_rows, reading.num_skipped) == ("vllm", 17, 4)
    assert rows.malformed == ()
    assert (rows.num_supports == rows.lengths).all()
    # The ninth request asked for no log-probabilities.
    assert (rows.num_logprobs == rows.lengths).tolist() == [True] * 10 + [False] + [True] * 6
    assert rows.lengths[rows.names.index("vllm_responses_tiny.jsonl:5")] == 14
    several = [name for name in rows.names if ":10, choice" in name]
    assert several == [f"vllm_responses_tiny.jsonl:10, choice {index}" for index in (0, 1)]
    assert rows.settings[2] == Setting(1.3, 200, 0.6, 0.02, asks_for_logprobs=True)
    expected = Setting(0.6, 100, 0.97, 0.0, asks_for_logprobs=False, looks_back="repetition_penalty")
    assert rows.settings[10] == expected
    assert rows.groups[3:6].tolist() == [3, 3, 3]
    keys = rows.token_of_id * 512 + rows.support_ids
    assert np.isin(np.arange(len(rows.token_ids)) * 512 + rows.token_ids, keys).all()


def test_a_streamed_answer_is_the_whole_one(tmp_path):
    lines = [json.loads(line) for line in (DATA / "vllm_responses_tiny.jsonl").read_text().splitlines()]
    events = lines[9]["stream"]
    first = [event["choices"][0] for event in events[:-1] if event["choices"] and event["choices"][0]["index"] == 0]
    write_lines(tmp_path / "a.jsonl", [lines[9]])
    rows = read_whole(tmp_path / "a.jsonl")
    assert rows.token_ids[:12].tolist() == flat(choice["token_ids"] for choice in first)
    masks = flat(choice["sampling_mask"] for choice in first)
    assert rows.support_sizes[:12].tolist() == [len(mask) for mask in masks]
    entries = flat(choice["logprobs"]["content"] for choice in first)
    assert rows.logprobs[:12].tolist() == [entry["logprob"] for entry in entries]


def test_a_temperature_is_raised_as_vllm_does(tmp_path):
    records = vllm_records(ROWS[:3])
    for record, value in zip(records, (0.0, 1e-6, 0.02), strict=True):
        record["request"]["sampling_params"] = {"temperature": value}
    write_lines(tmp_path / "a.jsonl", records)
    found = read_whole(tmp_path / "a.jsonl").settings
    raised = [Setting(temperature, 0, 1.0, 0.0, asks_for_logprobs=False) for temperature in (0.0, 0.01, 0.02)]
    assert found == tuple(raised)


def test_a_greedy_request_of_sglang_takes_one_id(tmp_path):
    request = {"input_ids": [1], "sampling_params": {"temperature": 0, "top_p": 0.5}}
    write_lines(tmp_path / "a.jsonl", [{"request": request, "response": sglang_answer(ROWS[0])}])
    assert read_whole(tmp_path / "a.jsonl").settings == (Setting(1.0, 1, 0.5, 0.0),)


def test_blank_and_refused_lines_are_counted(tmp_path):
    good = json.dumps(vllm_records(ROWS)[0])
    refused = json.dumps({"request": {}, "status": 400, "response": {"error": {"message": "no"}}})
    bare = json.dumps({"error": {"message": "no"}})
    (tmp_path / "a.jsonl").write_text(f"\ufeff\n{refused}\n{good}\n   \n{bare}\n\n{good}\n")
    reading = files.read(tmp_path / "a.jsonl")
    (rows,) = reading
    assert rows.names == ("a.jsonl:3", "a.jsonl:7")
    assert (reading.num_rows, reading.num_skipped, reading.num_blank) == (2, 2, 3)
    assert reading.num_bytes == (tmp_path / "a.jsonl").stat().st_size


def test_tokens_of_others_do_not_train(tmp_path):
    """Forced tokens have a support of one id with Miles, and none with prime-rl."""
    row = ROWS[0]
    sample = miles_sample(row, 0)
    sample["loss_mask"][3] = 0
    write_lines(tmp_path / "miles.jsonl", [sample])
    rows = read_whole(tmp_path / "miles.jsonl")
    assert np.flatnonzero(~rows.trains).tolist() == [3]
    assert rows.support_sizes[3] == len(row.supports[3])

    sample = prime_rl_sample(row)
    place, mask = len(row.prompt_ids) + 3, sample["sampling_mask"]
    begin = sum(mask["counts"][:place])
    for name in ("ids", "logprobs"):
        del mask[name][begin : begin + mask["counts"][place]]
    sample["mask"][place], mask["counts"][place] = False, 0
    write_lines(tmp_path / "prime.jsonl", [sample])
    rows = read_whole(tmp_path / "prime.jsonl")
    assert rows.malformed == ()
    assert np.flatnonzero(~rows.trains).tolist() == [3]
    assert rows.support_sizes.tolist() == [len(row.supports[t]) if t != 3 else -1 for t in range(len(row.token_ids))]
    assert rows.support_ids.tolist() == flat(support for t, support in enumerate(row.supports) if t != 3)


def test_temperatures_that_differ_are_nobodys(tmp_path):
    sample = prime_rl_sample(ROWS[0])
    sample["temperatures"][-1] = 0.9
    write_lines(tmp_path / "a.jsonl", [sample])
    assert read_whole(tmp_path / "a.jsonl").settings == (Setting(),)


def test_one_json_text_over_several_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(vllm_records(ROWS), indent=1))
    rows = read_whole(tmp_path / "a.json")
    assert rows.names[:2] == ("a.json:1, item 0", "a.json:1, item 1")
    assert rows.token_ids.tolist() == flat(row.token_ids for row in ROWS)


def test_answers_come_in_blocks_before_the_file_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RowsBuilder", functools.partial(RowsBuilder, max_tokens=1000))
    many = [json.dumps(record) for record in vllm_records(good_rows(2, 2, 40))] * 12
    (tmp_path / "a.jsonl").write_text("\n".join(many) + "\n")
    reading = files.read(tmp_path / "a.jsonl")
    first = next(reading)
    assert 1000 <= len(first.token_ids) < 1040
    assert first.num_bytes == reading.num_bytes < (tmp_path / "a.jsonl").stat().st_size * 0.6
    rest = list(reading)
    assert sum(len(block.names) for block in (first, *rest)) == 48
    assert sum(block.num_bytes for block in (first, *rest)) == reading.num_bytes
    # A prompt has one number in all blocks.
    assert set(rest[-1].groups.tolist()) == set(first.groups.tolist()) == {0, 1}


def test_a_block_is_full_by_tokens_by_ids_or_by_rows():
    assert 60_000 < BLOCK_TOKENS < 70_000
    for limits, completion, num in (
        ({"max_tokens": 10}, Completion("", [1] * 4), 3),
        ({"max_tokens": 10}, Completion("", [1], [[1] * 90]), 2),
        ({"max_rows": 5}, Completion("", []), 5),
    ):
        builder = RowsBuilder(**limits)
        for _ in range(num):
            assert not builder.is_full
            builder.add(completion)
        assert builder.is_full
        assert len(builder.build().names) == num
        assert builder.is_empty
        assert not builder.is_full


def test_a_form_that_is_told_is_not_looked_for(tmp_path):
    write_lines(tmp_path / "a.jsonl", [prime_rl_sample(ROWS[0])])
    with pytest.raises(files.UnreadableError, match="no completion in the form sglang"):
        list(files.read(tmp_path / "a.jsonl", form="sglang"))
    with pytest.raises(ValueError, match=r"form must be one of auto, sglang, vllm.*got 'csv'"):
        files.read(tmp_path / "a.jsonl", form="csv")


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"", "nothing"),
        (b"\n\n", "nothing"),
        (b"step,reward\n1,2\n", "Expecting value"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "'utf-8' codec"),
        (b'{"loss": 1.0}\n{"loss": 0.5}\n', "{'loss': 1.0}"),
        (b"\x1f\x8bgarbage", "compressed, and broken"),
        (b"PK\x03\x04garbage", "the archive cannot be read"),
        (b"[" * 100_000 + b"\n", "too deep"),
        (b'{"request": {}, "status": 500, "response": {"error": 1}}\n', "status"),
        (pickle.dumps({"a": 1}), "'utf-8' codec"),
    ],
)
def test_what_is_no_rollout_is_refused_by_name(tmp_path, content, seen):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(files.UnreadableError, match=r"a\.bin") as refused:
        list(files.read(tmp_path / "a.bin"))
    assert seen in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(files.UnreadableError, match="cannot be read"):
        files.read(tmp_path / "none.jsonl")


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    arrays = rollout_arrays(ROWS) | {"logprobs": np.array([Trap()], object)}
    np.savez(tmp_path / "a.npz", **arrays, allow_pickle=True)
    rows = read_whole(tmp_path / "a.npz")
    assert not (tmp_path / "sprung").exists()
    assert [malformed.field for malformed in rows.malformed] == ["logprobs"]
    assert (rows.num_logprobs == -1).all()


def test_the_last_line_may_be_cut_off(tmp_path):
    text = "".join(json.dumps(record) + "\n" for record in vllm_records(ROWS))
    (tmp_path / "a.jsonl").write_text(text[:-40])
    rows = read_whole(tmp_path / "a.jsonl")
    (malformed,) = rows.malformed
    assert malformed.row == len(ROWS) - 1
    assert malformed.text.startswith("the last line is not whole")
    assert rows.lengths[-1] == rows.num_supports[-1] == 0

    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode())[:-900])
    rows = read_whole(tmp_path / "b.jsonl.gz")
    assert "compressed, and broken" in rows.malformed[-1].text
    assert rows.token_ids[:5].tolist() == ROWS[0].token_ids[:5]


HOSTILE_LINES = {
    "no UTF-8": b'{"choices": [{"token_ids": "\xff"}]}',
    "no JSON": b"{'choices': []}",
    "half of it": b'{"choices": [{"token_ids": [1,',
    "too deep": b'{"choices": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "an integer of 5000 digits": b'{"choices": [' + b"9" * 5000 + b"]}",
    "a number": b"17",
    "null": b"null",
    "an empty list": b"[]",
    "another object": b'{"loss": 1.0}',
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_bad_line_is_one_bad_row(tmp_path, line):
    good = json.dumps(vllm_records(ROWS)[0]).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, line, good]) + b"\n")
    rows = read_whole(tmp_path / "a.jsonl")
    assert rows.names == ("a.jsonl:1", "a.jsonl:2", "a.jsonl:3")
    assert [(malformed.row, malformed.field) for malformed in rows.malformed] == [(1, "line")]
    assert rows.lengths.tolist() == [len(ROWS[0].token_ids), 0, len(ROWS[0].token_ids)]


def test_of_a_key_that_stands_twice_the_last_counts(tmp_path):
    text = json.dumps({"choices": [vllm_choice(ROWS[0])]}).replace('"index": 0', '"token_ids": [1, 2], "index": 0', 1)
    (tmp_path / "a.jsonl").write_text(text + "\n")
    assert read_whole(tmp_path / "a.jsonl").token_ids.tolist() == ROWS[0].token_ids


def test_an_archive_made_to_fill_the_memory_is_not_read(tmp_path, monkeypatch):
    """Zeros shrink to a thousandth; what is large and does not shrink is a large rollout."""
    monkeypatch.setattr(archives, "MAX_UNPACKED", 2**20)
    np.savez_compressed(tmp_path / "bomb.npz", token_ids_0=np.zeros(2**19, np.int64))
    with pytest.raises(files.UnreadableError, match=r"token_ids_0\.npy: \d+ bytes would unpack to 4194432"):
        [*files.read(tmp_path / "bomb.npz")]
    some = np.random.default_rng(0).integers(0, 2**60, 2**19)
    np.savez_compressed(tmp_path / "large.npz", tokens_0=some, response_length_0=2**19)
    assert read_whole(tmp_path / "large.npz").lengths.tolist() == [2**19]
