"""The pure parts of the benchmark of a whole iteration: loops of others by steps, rewards, memory, the table."""

import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# A side that anyone can run; its loop waits in a thread that no end of input stops.
SIDE = """
import threading
from grpo_case import Rewards
from process_memory import Measured
from stepping import Stepper

class Rival(Measured):
    def __init__(self, folder, max_length, *, case, group_size):
        super().__init__()
        self.rewards, self.stepper = Rewards(10), Stepper(self._train)
        self.completions = [[1] * case["max_new_tokens"]] * (len(case["prompts"]) * group_size)

    def token_logprobs(self, token_ids):
        return [-1.0 for _ in token_ids[1:]]

    def step(self):
        self.rewards.begin()
        self.stepper.step()
        return self.rewards.told()

    def compiled(self):
        return {"rollout": 1.0}

    def _train(self):
        threading.Thread(target=threading.Event().wait).start()
        while True:
            self.stepper.wait()
            self.rewards(self.completions)
"""


@pytest.fixture(scope="module")
def benchmarks():
    """Scripts find each other in their own folder."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(BENCHMARKS))
    yield patch
    patch.undo()


def test_a_loop_runs_a_step_at_a_time(benchmarks):
    from stepping import Stepper

    seen = []

    def train():
        for step in range(2):
            stepper.wait()
            seen.append(step)
        stepper.wait()
        raise ValueError("step 2 fails")

    stepper = Stepper(train)
    assert seen == []
    stepper.step()
    assert seen == [0]
    stepper.step()
    assert seen == [0, 1]
    with pytest.raises(ValueError, match="step 2 fails"):
        stepper.step()


def test_rewards_count_the_lower_half(benchmarks):
    from grpo_case import Rewards

    rewards = Rewards(10)
    rewards.begin()
    assert rewards([[0, 4, 5, 9], [1, 2, 3]]) == [0.5, 1.0]
    assert rewards.told()["num_tokens"] == 7
    assert 0 <= rewards.told()["rollout"] < 60


def test_a_peak_is_forgotten(benchmarks):
    from process_memory import Measured

    measured = Measured()
    large = np.ones(2**25)
    at_most = measured.memory()["peak"]
    assert at_most > large.nbytes / 2**20
    del large
    measured.forget_peak()
    assert measured.memory()["peak"] < at_most - 200


def test_sides_are_measured_and_ended(benchmarks, tmp_path, monkeypatch, capsys):
    import grpo_step
    import worker
    from generate_case import Case

    (tmp_path / "side_plain.py").write_text(SIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(worker, "SECONDS_TO_END", 0.2)
    monkeypatch.setattr(grpo_step, "MODULES", {"ours": "side_plain", "tunix": "side_plain", "trl": "is_not_there"})
    case = Case(((1, 2), (3, 4)), 5)
    pythons = dict.fromkeys(("ours", "tunix", "trl"), sys.executable)
    grpo_step.run_size("2x3", "a folder", pythons, case, 3, rounds=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("trl is skipped: ModuleNotFoundError")
    rows = [line for line in lines if line.startswith("| 2x3, ")]
    assert [row.split("|")[1].strip() for row in rows] == ["2x3, ours", "2x3, tunix"]
    assert "1.00x" in rows[0]
    assert lines[-1] == "ours, compiled programs, MiB: rollout 1"
