import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stub_llm import MASK, PIECES, StubLLM

import serve
from serve import cli
from serve.outputs import SamplingMask

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(autouse=True)
def llms(monkeypatch):
    """The models that the command loads."""
    monkeypatch.setitem(serve.__dict__, "LLM", StubLLM)
    monkeypatch.setattr(StubLLM, "made", [])
    return StubLLM.made


def asked(llms, *argv):
    assert cli.main(["generate", "model", *argv]) == 0
    (llm,) = llms
    return llm


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["MODEL"]),
        (["model", "--port", "many"], ["--port", "'many'"]),
        (["model", "--port", "0", "--drain-timeout", "0"], ["drain_timeout must be in (0, inf) seconds, got 0.0."]),
        (["model", "--port", "65536"], ["port must be in [0, 65535], got 65536."]),
        (["model", "--port", "0", "--host", ""], ["host must not be empty"]),
        (["model", "--port", "0", "--max-waiting", "-1"], ["max_waiting must be at least 0, got -1."]),
        (["model", "--port", "0", "--speculative-config", "["], ["speculative_config must be JSON, got '['"]),
        (["generate"], ["MODEL"]),
        (["generate", "model"], ["at least one prompt"]),
        (["generate", "model", "text", "--top-k", "many"], ["--top-k", "'many'"]),
        (["generate", "model", "text", "--colour", "red"], ["--colour"]),
        (["generate", "model", "text", "--dtype", "int8"], ["--dtype", "'int8'", "float32"]),
        (["generate", "model", "text", "--top-p", "0"], ["top_p must be in (0, 1], got 0.0."]),
        (["generate", "model", "text", "--temperature", "nan"], ["temperature must be a finite number, got nan."]),
        (["generate", "model", "text", "--temperature", "0", "--n", "2"], ["n must be 1 when using greedy sampling"]),
        (["generate", "model", "text", "--stop", ""], ["stop must hold strings"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys, llms):
    assert cli.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err
    assert not llms, "nothing may be loaded"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (FileNotFoundError("no model at 'x',\nallowed: y"), 2, "error: no model at 'x', allowed: y\n"),
        (
            ValueError("max_model_len must be at least 1, got 0."),
            2,
            "error: max_model_len must be at least 1, got 0.\n",
        ),
        (RuntimeError("RESOURCE_EXHAUSTED"), 1, "error: RESOURCE_EXHAUSTED\n"),
        (MemoryError(), 1, "error: MemoryError\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_fails_while_loading(error, code, said, capsys, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setitem(serve.__dict__, "LLM", fail)
    assert cli.main(["generate", "model", "text"]) == code
    assert capsys.readouterr() == ("", said)


def test_masks_are_on_and_bounded_by_top_k(llms):
    llm = asked(llms, "one", "two")
    assert llm.model == "model"
    assert llm.settings == {
        "return_sampling_mask": True,
        "logprobs_mode": "processed_logprobs",
        "unbounded_support": False,
        "max_model_len": None,
        "dtype": "float32",
    }
    prompts, params = llm.asked
    assert prompts == ["one", "two"]
    assert (params.top_k, params.top_p, params.max_tokens, params.return_sampling_mask) == (50, 0.95, 64, None)


@pytest.mark.parametrize("top_k", ["0", "-1"])
def test_without_top_k_supports_have_no_bound(llms, top_k):
    settings = asked(llms, "text", "--top-k", top_k, "--top-p", "0.9").settings
    assert (settings["return_sampling_mask"], settings["unbounded_support"]) == (True, True)


@pytest.mark.parametrize("argv", [["--temperature", "0"], ["--no-sampling-mask"]])
def test_without_a_mask(llms, argv, capsys):
    llm = asked(llms, "text", *argv)
    assert llm.settings["return_sampling_mask"] is llm.settings["unbounded_support"] is False
    assert llm.settings["logprobs_mode"] == "raw_logprobs"
    assert llm.asked[1].return_sampling_mask is False
    assert "support" not in capsys.readouterr().out


def test_settings_reach_the_request(llms):
    argv = ["--top-k", "7", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.5", "--max-tokens", "5"]
    argv += ["--n", "2", "--seed", "-3", "--stop", "a", "--stop", "b", "--logprobs", "4", "--temperature", "0.5"]
    params = asked(llms, "text", *argv, "--dtype", "bfloat16", "--max-model-len", "128").asked[1]
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (7, 0.9, 0.1, 0.5)
    assert (params.repetition_penalty, params.max_tokens, params.n, params.seed) == (1.5, 5, 2, -3)
    assert (params.stop, params.logprobs) == (("a", "b"), 4)
    assert (llms[0].settings["dtype"], llms[0].settings["max_model_len"]) == ("bfloat16", 128)


def test_chat_makes_a_conversation_of_each_prompt(llms):
    messages, _ = asked(llms, "one", "two", "--chat").asked
    assert messages == [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]]


def test_text_on_the_screen(llms, capsys):
    asked(llms, "Where?", "--n", "2", "--sizes")
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == ""
    assert lines[:4] == [
        "Where?",
        "Paris[1], of[1] course[2].\u21b5[8]",
        "\u21b5[9]",
        "It[32] is\\x1b[31m[33]<|eos|>[3]",
    ]
    assert lines.count("8 tokens (stop)   support mean 11.1, median 5.5, max 33   25% of one id") == 2
    assert lines[-1].startswith("16 tokens in ")
    assert lines[-1].endswith(" tokens/s")
    # Not a terminal: no escape code, and no legend of colours.
    assert "\x1b" not in said.out
    assert "ids in the support" not in said.out


def test_colours_on_a_terminal(llms, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    asked(llms, "Where?")
    said = capsys.readouterr().out
    assert "\x1b[36m course\x1b[0m" in said
    assert "ids in the support" in said
    assert "\x1b[31m" not in said
    llms.clear()
    asked(llms, "Where?", "--plain")
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err


def test_one_json_object_for_each_completion(llms, capsys):
    asked(llms, "one", "two", "--n", "2", "--json", "--logprobs", "1")
    said = capsys.readouterr().out
    assert said.isascii()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    objects = [json.loads(line, parse_constant=refuse) for line in said.splitlines()]
    assert [(entry["request_id"], entry["prompt"], entry["index"]) for entry in objects] == [
        ("0", "one", 0),
        ("0", "one", 1),
        ("1", "two", 0),
        ("1", "two", 1),
    ]
    first = objects[0]
    assert SamplingMask.from_lists(first["sampling_mask"]) == MASK
    assert (first["prompt_token_ids"], first["token_ids"]) == ([1, 2], list(range(8)))
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("".join(PIECES[:-1]), "stop", None)
    assert first["cumulative_logprob"] == -4.0
    assert first["logprobs"][0] == {
        "0": {"logprob": -0.5, "rank": 1, "decoded_token": "Paris"},
        "7": {"logprob": -9999.0, "rank": 2, "decoded_token": "x"},
    }


def test_json_without_masks_and_logprobs(llms, capsys):
    asked(llms, "one", "--json", "--temperature", "0")
    entry = json.loads(capsys.readouterr().out)
    assert entry["sampling_mask"] is entry["logprobs"] is entry["cumulative_logprob"] is None


def test_a_completion_that_failed_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(StubLLM, "finish_reason", "error")
    assert cli.main(["generate", "model", "one", "two"]) == 1
    assert capsys.readouterr().err == "error: 2 of 2 completions ended in an error\n"


@pytest.mark.parametrize(
    ("argv", "beginning"),
    [
        (["--help"], "usage: python -m serve MODEL"),
        (["-h"], "usage: python -m serve MODEL"),
        (["generate", "--help"], "usage: python -m serve generate"),
        (["model", "--help"], "usage: python -m serve"),
    ],
)
def test_help_is_no_error(argv, beginning, capsys):
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = stop.code
    assert code in (0, None)
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(beginning)


def test_the_command_line_is_read_before_jax_is_imported():
    """As a process of its own: here JAX is there already."""
    code = "import sys, serve.cli; code = serve.cli.main(sys.argv[1:]); print('jax' in sys.modules); sys.exit(code)"
    for argv in (["--help"], ["generate", "model", "text", "--top-k", "many"], ["model", "--port", "many"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.splitlines()[-1] == "False", done
        assert done.returncode == (0 if argv == ["--help"] else 2)


def test_an_interrupt_while_jax_loads_waits_for_it(monkeypatch, capsys, llms):
    loaded = []

    def load(name):
        signal.raise_signal(signal.SIGINT)
        loaded.append(name)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(cli.importlib, "import_module", load)
    assert cli.main(["generate", "model", "text"]) == 130
    assert capsys.readouterr() == ("", "")
    assert loaded == ["jaxmask"]
    assert not llms
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_hears_no_complaint(unbuffered):
    command = [sys.executable, "-m", "serve", "--help"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_public_names(monkeypatch):
    monkeypatch.delitem(serve.__dict__, "LLM")
    assert dir(serve) == ["CompletionOutput", "LLM", "Logprob", "RequestOutput", "SamplingMask", "SamplingParams"]
    assert serve.SamplingMask is SamplingMask
    with pytest.raises(AttributeError, match="module 'serve' has no attribute 'Engine'"):
        serve.Engine  # noqa: B018
