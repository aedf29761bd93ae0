"""The command as a shell sees it: exit codes, what it prints and where, several files, the input, a closed pipe."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxmask.__main__ import main
from tests.planted_faults import FAULTS
from tests.rollout_files import VARIANTS, good_rows

DATA = Path(__file__).with_name("data")


@pytest.fixture
def good(tmp_path):
    VARIANTS["vllm"].write(tmp_path / "good.jsonl", good_rows())
    return tmp_path / "good.jsonl"


@pytest.fixture
def bad(tmp_path):
    rows = good_rows()
    FAULTS["the drawn id taken out"].plant(rows)
    VARIANTS["vllm"].write(tmp_path / "bad.jsonl", rows)
    return tmp_path / "bad.jsonl"


def run(capsys, *arguments):
    try:
        code = main(["audit", *map(str, arguments)])
    except SystemExit as error:
        code = error.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize(("name", "vocab_size"), [("tiny", 512), ("smollm2", 49152)])
def test_real_answers_of_vllm_pass(capsys, name, vocab_size):
    code, out, _ = run(capsys, DATA / f"vllm_responses_{name}.jsonl", "--vocab-size", vocab_size, "--json")
    found = json.loads(out)
    assert (code, found["is_fit"]) == (0, True)
    assert {one["severity"] for one in found["findings"]} <= {"warning"}
    if name == "tiny":
        assert (found["files"][0]["num_rows"], found["files"][0]["num_skipped"]) == (17, 4)
        # vLLM keeps all six ids that tie at top-k 2.
        ties = next(one for one in found["findings"] if one["code"] == "wider-than-top-k")
        assert ties["worst"][0]["detail"] == "6 ids at top_k 2"


def test_exit_codes_are_the_verdict(capsys, good, bad):
    assert run(capsys, good)[0] == 0
    code, out, err = run(capsys, bad)
    assert (code, err) == (1, "")
    assert out.startswith("NOT fit to train on: 1 kind of fault in 1 row of 6\n")


def test_several_files_are_one_audit(capsys, good, bad):
    code, out, _ = run(capsys, good, bad, "--json")
    found = json.loads(out)
    assert code == 1
    assert [Path(one["name"]).name for one in found["files"]] == ["good.jsonl", "bad.jsonl"]
    assert found["statistics"]["num_rows"] == 12
    # All but the changed row stand in both.
    assert {one["code"] for one in found["findings"]} >= {"sampled-outside", "duplicate-completion"}


def test_groups_of_two_files_are_two(capsys, tmp_path):
    """The first prompt of each file is group 0 of it, and not one group."""
    for seed in (1, 2):
        VARIANTS["vllm"].write(tmp_path / f"{seed}.jsonl", good_rows(seed=seed))
    assert json.loads(run(capsys, tmp_path / "1.jsonl", tmp_path / "2.jsonl", "--json")[1])["findings"] == []


def test_the_input_is_a_file_like_others(capsys, monkeypatch, bad):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bad.read_bytes())))
    code, out, _ = run(capsys, "-")
    assert code == 1
    assert "stdin:4, position 5" in out


def test_a_pipe_is_read_whole_and_goes_by_its_name(capsys, monkeypatch, tmp_path, bad):
    """A file is opened to find its form out, and again to read it: a pipe would lose its first lines."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(bad.read_bytes() * 20,), daemon=True)
    writer.start()
    code, out, _ = run(capsys, pipe, "--json")
    writer.join(10)
    files = json.loads(out)["files"]
    assert (code, files) == (1, [{"name": str(pipe), "form": "vllm", "num_rows": 120, "num_skipped": 0}])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bad.read_bytes())))
    assert json.loads(run(capsys, "-", "--json")[1])["files"][0]["name"] == "-"
    monkeypatch.setattr(sys, "stdin", None)
    assert run(capsys, "-") == (2, "", "jaxmask audit: the input is closed.\n")


def test_errors_hold_nothing_that_a_terminal_would_act_on(capsys, tmp_path):
    path = tmp_path / "\x1b[31mred.jsonl"
    path.write_text("x")
    code, out, err = run(capsys, path)
    assert (code, out) == (2, "")
    assert "\\x1b[31mred.jsonl" in err
    assert "\x1b" not in err


def test_a_report_that_cannot_be_written_is_no_verdict(good):
    command = [sys.executable, "-m", "jaxmask", "audit", str(good)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, cwd=DATA.parents[1], timeout=120, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith(b"jaxmask audit: ")


def test_the_page_is_written_besides(capsys, good, tmp_path):
    code, out, _ = run(capsys, good, "--html", tmp_path / "page.html", "--json")
    assert code == 0
    json.loads(out)
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_strict_and_show(capsys, tmp_path):
    rows = good_rows()
    FAULTS["ids not in order"].plant(rows)
    VARIANTS["vllm"].write(tmp_path / "warned.jsonl", rows)
    assert run(capsys, tmp_path / "warned.jsonl")[0] == 0
    code, out, _ = run(capsys, tmp_path / "warned.jsonl", "--strict", "--show", 0)
    assert code == 1
    assert "position" not in out


def test_stop_ids_come_from_the_options_or_the_request(capsys, tmp_path):
    rows = good_rows()
    FAULTS["a token behind the stop id"].plant(rows)
    path = tmp_path / "rollouts.jsonl"
    VARIANTS["vllm"].write(path, rows)
    assert run(capsys, path)[0] == 0
    assert run(capsys, "--eos-token-id", 8, "--eos-token-id", 9, path)[0] == 1
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["request"]["sampling_params"]["stop_token_ids"] = [8]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "trains-behind-stop" in run(capsys, path)[1]
    for record in records:
        record["request"]["sampling_params"] |= {"stop_token_ids": None, "ignore_eos": True}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run(capsys, path, "--eos-token-id", 8)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["GOOD", "--vocab-size", "0"], "vocab_size must be at least 1, got 0"),
        (["GOOD", "--vocab-size", "many"], "--vocab-size: invalid int value: 'many'"),
        (["GOOD", "--tolerance", "2"], "tolerance must be in [0, 1), got 2.0"),
        (["GOOD", "--eos-token-id", "-3"], "eos_token_ids must be 0 or more, got -3"),
        (["GOOD", "--form", "parquet"], "invalid choice: 'parquet'"),
        (["GOOD", "--html", "no/such/folder/page.html"], "no/such/folder/page.html"),
        (["EMPTY"], "empty.jsonl"),
        ([], "FILE"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, good, tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    paths = {"GOOD": good, "EMPTY": tmp_path / "empty.jsonl"}
    code, out, err = run(capsys, *(paths.get(one, one) for one in arguments))
    assert (code, out) == (2, "")
    assert text in err
    assert "Traceback" not in err


def test_a_closed_pipe_is_no_error(bad):
    """The process writes into a pipe that nobody reads any more."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "jaxmask", "audit", str(bad)]
    with os.fdopen(writes, "wb") as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, cwd=DATA.parents[1], timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


# As `python -m jaxmask`; a shell's background jobs, and what they start, ignore interrupts until they say otherwise.
HEEDING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxmask.__main__ import main
raise SystemExit(main(["audit", "-"]))
"""


def test_an_interrupt_is_one_line():
    command, pipe = [sys.executable, "-c", HEEDING], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, cwd=DATA.parents[1]) as process:
        # More than a pipe holds: somebody reads when this is through.
        process.stdin.write(b"{}\n" * 100_000)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        code, error = process.wait(timeout=60), process.stderr.read()
    assert (code, error) == (130, b"jaxmask audit: interrupted.\n")
