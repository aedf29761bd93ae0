"""Reward functions in worker processes: what hangs, dies or answers nonsense costs its own completion alone."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from train.rewards import RewardRunner, parse_rewards
from train.rewards.verifiers import LastInteger, MathAnswer

# "hold" never lets Python go: only a signal that Python does not handle ends it.
FUNCTIONS = """
import math, os, re, sys, time

def f(prompts, completions, **columns):
    for completion in completions:
        if completion == "hang":
            time.sleep(1000)
        if completion == "hold":
            re.match("(a+)+$", "a" * 60 + "b")
        if completion == "exit":
            os._exit(7)
        if completion == "kill":
            os.kill(os.getpid(), 11)
        if completion == "raise":
            raise type("Odd", (Exception,), {})("odd")
        if completion == "short":
            return []
        if completion == "nan":
            return [math.nan for _ in completions]
        if completion == "odd":
            return [lambda: 0 for _ in completions]
        if completion == "print":
            print("noise " * 10_000, flush=True)
            print("noise", file=sys.stderr, flush=True)
    return [len(completion) for completion in completions]

def process(completions):
    return [os.getpid() for _ in completions]

def needs(completions, colour):
    return colour

def devices(completions):
    import jax
    return [jax.default_backend() == "cpu" for _ in completions]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    path.with_name("ends.py").write_text("import os\nos._exit(7)\n")
    return path


def make_runner(functions, *entries, verifier=None, num_workers=2, timeout=1.0):
    return RewardRunner(
        parse_rewards([f"{functions.parent}/{entry}" if ".py:" in entry else entry for entry in entries]),
        verifier or LastInteger(),
        columns=["answer"],
        num_workers=num_workers,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def runner(functions):
    runner = make_runner(functions, "answer=0.5", "mine.py:f=0.25")
    yield runner
    runner.close()


def score(runner, completions, group_size=4):
    columns = {"answer": ["1"] * len(completions)}
    return runner.score(["q"] * len(completions), completions, columns, group_size)


def test_scores_are_weighted_sums(runner):
    scores = score(runner, ["1", "22", "", "so 1"])
    assert scores.values.dtype == np.float32
    assert scores.values.tolist() == [0.75, 0.5, 0, 1.5]
    assert scores.is_exact.tolist() == [True, False, False, True]
    assert scores.details == {
        "rewards/answer": 0.5,
        "rewards/f": 1.75,
        "rewards/num_failed": 0,
        "rewards/num_timeouts": 0,
    }


@pytest.mark.parametrize(
    ("bad", "num_timeouts"),
    [("hang", 1), ("hold", 1), ("exit", 0), ("kill", 0), ("raise", 0), ("short", 0), ("nan", 0), ("odd", 0)],
)
def test_a_bad_completion_costs_its_neighbours_nothing(runner, bad, num_timeouts):
    scores = score(runner, ["1", bad, "333", "1", "1", "1", "1", "1"])
    assert scores.values.tolist() == [0.75, 0, 0.75, 0.75] + [0.75] * 4
    assert scores.details["rewards/num_failed"] == 1
    assert scores.details["rewards/num_timeouts"] == num_timeouts


def test_warnings_come_once_per_kind(functions, caplog):
    runner = make_runner(functions, "mine.py:f")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            score(runner, ["raise", "exit", "raise", "exit"])
    runner.close()
    assert sorted(record.getMessage() for record in caplog.records) == [
        "a reward function died (its process ended with code 7); such scores are 0",
        "a reward function failed (Odd: odd); such scores are 0",
    ]


def test_scores_are_the_same_with_any_number_of_workers(runner, functions):
    completions = ["1", "exit", "\U0001f600 \u00e4\0", "x" * 10**6, "", "print", "raise", "7" * 5000] * 2
    one = make_runner(functions, "answer=0.5", "mine.py:f=0.25", num_workers=1)
    first, second = score(runner, completions), score(one, completions)
    one.close()
    assert first.values.tobytes() == second.values.tobytes()
    assert first.details == second.details
    assert first.values[3] == 250_000


def test_nothing_is_printed(runner, capfd):
    assert score(runner, ["print"] * 4).values.tolist() == [1.25] * 4
    assert capfd.readouterr() == ("", "")


def test_workers_killed_from_outside_are_replaced_and_nothing_is_lost(functions):
    runner = make_runner(functions, "mine.py:process")
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for pid in set(score(runner, ["a"] * 8, 1).values.astype(int).tolist()):
            os.kill(pid, signal_number)
        scores = score(runner, ["a"] * 8, 1)
        assert scores.details["rewards/num_failed"] == 0
        assert (scores.values > 0).all()
    runner.close()


def test_functions_may_use_jax_on_the_cpu_alone(functions):
    runner = make_runner(functions, "mine.py:devices", timeout=60.0)
    assert score(runner, ["a"] * 4).values.tolist() == [1, 1, 1, 1]
    runner.close()


def test_the_verifier_counts_only_where_it_is_named(functions):
    runner = make_runner(functions, "mine.py:f", verifier=MathAnswer(), timeout=30.0)
    scores = score(runner, ["\\boxed{\\frac{2}{2}}", "1.0", "2", ""])
    runner.close()
    assert scores.values.tolist() == [19, 3, 1, 0]
    assert scores.is_exact.tolist() == [True, True, False, False]
    assert scores.details["rewards/answer"] == 0.5


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("mine.py:g", "has no function 'g'"),
        ("none.py:f", "there is no file"),
        ("no_such_module:f", "No module named"),
        ("ends.py:f", "its process ended with code 7 while it was loaded"),
        ("mine.py:needs", "it takes colour; there are prompts, completions, answer"),
    ],
)
def test_functions_that_cannot_be_used_are_refused_at_the_start(functions, entry, reason):
    with pytest.raises(ValueError, match=r"^rewards: .* cannot be used") as refused:
        make_runner(functions, entry)
    assert reason in str(refused.value)


def test_a_closed_runner_has_no_processes(functions):
    runner = make_runner(functions, "mine.py:process")
    pids = set(score(runner, ["a"] * 8, 1).values.astype(int).tolist())
    runner.close()
    runner.close()
    assert all(is_gone(pid) for pid in pids)


def test_scores_that_are_waited_for_while_the_runner_is_closed_end_at_once(functions):
    """And no new workers are started for what was not scored."""
    runner = make_runner(functions, "mine.py:f", timeout=1000.0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(score, runner, ["hang"] * 8)
        time.sleep(1)
        runner.close()
        with pytest.raises(RuntimeError, match="were ended"):
            waiting.result(timeout=60)


def is_gone(pid):
    """Whether a process ends within ten seconds."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_workers_end_with_the_run(functions, how):
    """Also those whose function sleeps, or never lets Python go."""
    code = f"""
        import os, threading, time
        from train.rewards import RewardRunner, parse_rewards
        from train.rewards.verifiers import LastInteger
        if __name__ == "__main__":
            runner = RewardRunner(parse_rewards([{str(functions) + ":process"!r}, {str(functions) + ":f"!r}]),
                LastInteger(), columns=["answer"], num_workers=2, timeout=100.0)
            score = lambda texts: runner.score(["q"] * len(texts), texts, {{"answer": ["1"] * len(texts)}}, 1)
            print(*map(int, score(["a"] * 8).values - 1), flush=True)
            threading.Thread(target=score, args=(["hang", "hold"],), daemon=True).start()
            time.sleep({100 if how == "kill" else 1})
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    pids = {int(pid) for pid in run.stdout.readline().split()}
    assert pids
    if how == "kill":
        time.sleep(1)
        run.kill()
    assert run.wait(60) == (-signal.SIGKILL if how == "kill" else 0)
    run.stdout.close()
    assert all(is_gone(pid) for pid in pids)
