"""Two processes of two devices each, on one machine: what one process with four devices does.

The pair starts once for all tests; each has a time limit, since what is wrong here hangs.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import process_worker
import pytest
from process_worker import LOST, NUM_PROCESSES, SORT, STOP_AFTER
from text_model import write_text_model

import models
from train import build, checkpoint, cli, processes, report
from train.metrics import metrics_row
from train.processes import Cluster

ROOT = Path(__file__).parents[2]
SECONDS = 400
# Sums over rows and devices are added up in another order, and the pair's programs are compiled in less time.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder of the pair, and what each process printed."""
    folder = tmp_path_factory.mktemp("pair")
    write_text_model(folder / "text")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # Of two flags that contradict each other, XLA takes the last.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, process_worker.__file__, str(folder), str(port)]
    started = []
    for number in range(NUM_PROCESSES):
        with (folder / f"log-{number}").open("w") as log:
            started.append(subprocess.Popen([*command, str(number)], env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = [(folder / f"log-{number}").read_text() for number in range(NUM_PROCESSES)]
    assert codes == [0, 0], "\n".join(logs)
    return folder, logs


@pytest.fixture(scope="module")
def found(pair):
    return [json.loads((pair[0] / f"found-{number}.json").read_text()) for number in range(NUM_PROCESSES)]


@pytest.fixture(scope="module")
def alone():
    """One process on the same mesh: the run's parts, weights and rows after each iteration, and one iteration more."""
    with pytest.MonkeyPatch.context() as patch:
        optimizer = build.make_optimizer(SORT.grpo, SORT.iterations)
        patch.setattr(build, "make_optimizer", lambda *_: optimizer)
        built = build.build(SORT)
        like = build.build(SORT).run
    states, rows, state = [], [], built.run
    for step in range(STOP_AFTER + 1):
        state, iteration = built.loop.iterate(state, step)
        states.append(processes.to_host(jax.tree.leaves(state.train.model)))
        rows.append(metrics_row(processes.to_host(iteration.metrics)))
    return built, like, states, rows


def assert_same_row(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=TOLERANCE, err_msg=name)


@pytest.mark.slow
def test_losses_and_rewards_are_those_of_one_process(pair, alone):
    rows = report.read_metrics(pair[0] / "sort" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STOP_AFTER))
    for row, expected in zip(rows, alone[3], strict=False):
        assert_same_row(row, expected)


@pytest.mark.slow
def test_a_signal_to_one_process_saves_and_ends_both(pair, found):
    folder, logs = pair
    assert len(found) == NUM_PROCESSES, "both ended of themselves, with exit code 0"
    assert checkpoint.finished_steps(folder / "sort" / "checkpoints") == [2, STOP_AFTER]
    assert f"stopped by SIGTERM after iteration {STOP_AFTER}" in logs[0]
    assert "stopped by SIGTERM" not in logs[1], "the second process prints nothing"


@pytest.mark.slow
def test_one_process_resumes_what_two_have_written(pair, alone):
    built, like, states, rows = alone
    step, state = checkpoint.restore_latest(pair[0] / "sort" / "checkpoints", like, pytest.fail)
    assert step == STOP_AFTER
    for one, other in zip(jax.tree.leaves(state.train.model), states[step - 1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)
    # The saved arrays lie where those of this process's own state lie.
    shardings = [[leaf.sharding for leaf in jax.tree.leaves(each.train)] for each in (state, like)]
    assert shardings[0] == shardings[1]
    _, iteration = built.loop.iterate(state, step)
    assert_same_row(metrics_row(processes.to_host(iteration.metrics)), rows[step])


@pytest.mark.slow
def test_a_reward_that_raises_in_the_first_process_ends_all(pair, found):
    """Before, both have done an iteration whose rewards came from the first process alone."""
    folder, logs = pair
    assert [each["host"]["exit code"] for each in found] == [2, 2]
    assert [each["host"]["num scored"] for each in found] == [3, 0]
    assert all(f"error: {LOST}" in log for log in logs)
    (row,) = report.read_metrics(folder / "host" / "metrics.jsonl")
    assert {"eval/greedy", "support/kept_mass", "rewards/answer", "loss"} <= row.keys()
    assert 0 < row["support/kept_mass"] < 1
    assert row["ratio/max_error"] <= TOLERANCE
    assert checkpoint.finished_steps(folder / "host" / "checkpoints") == [1]


@pytest.mark.slow
def test_what_processes_do_together(found):
    first, second = (each["together"] for each in found)
    assert first["value"] == second["value"] == 0
    assert first["own error"] == "OwnError: 1 and 2"
    assert second["own error"] == "RuntimeError: OwnError in process 0: 1 and 2"
    assert first["error of one"] == "RuntimeError: another process failed"
    assert second["error of one"] == "OSError: disk full"
    assert first["any"] == second["any"] == [True, False]
    values = np.arange(8.0).reshape(4, 2).tolist()
    assert first["held here"] == second["held here"] == [[2, 1], [2, 1]]
    assert first["whole"] == second["whole"] == first["of the first"] == values
    assert second["of the first"] is None
    assert first["draw"] == second["draw"] == float(jax.random.uniform(jax.random.key(7)))


@pytest.mark.slow
def test_a_mesh_that_leaves_devices_out_is_refused_by_all(found):
    for each in found:
        assert "mesh must cut over all 4 devices of the 2 processes, as 'data=4' does, got ''" in each["one device"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--process-id", "0"], ["--process-id needs --coordinator and --num-processes too"]),
        (["--coordinator", "here", "--num-processes", "2", "--process-id", "0"], ["HOST:PORT", "'here'"]),
        (["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"], ["--process-id", "[0, 2)", "got 2"]),
        (["--coordinator", "a:1", "--num-processes", "0", "--process-id", "0"], ["--num-processes", "at least 1"]),
        (["--coordinator", "a:1", "--num-processes", "x", "--process-id", "0"], ["--num-processes", "'x'"]),
        (["--distributed", "--process-id", "0"], ["--distributed", "--process-id"]),
        (["--distributed", "--print-config"], ["--print-config", "one process"]),
    ],
)
def test_bad_options_of_processes_are_one_line(options, words, capsys):
    assert cli.main(options) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert all(word in said for word in words)


def test_processes_meet_before_anything_asks_for_devices(monkeypatch):
    met = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *where, **options: met.append((where, options)))
    monkeypatch.setattr(cli, "is_first", lambda: True)
    monkeypatch.setattr(cli.run, "start", lambda config, folder, console: met.append(config.mesh))
    cluster = ["--coordinator", "host-0:1234", "--num-processes", "4", "--process-id", "3"]
    assert cli.main(["--mesh", "data=4", *cluster]) == cli.main(["--distributed"]) == 0
    options = {"shutdown_timeout_seconds": processes.SECONDS_TO_LEAVE}
    assert met == [(("host-0:1234", 4, 3), options), "data=4", ((None, None, None), options), ""]


def test_one_process_needs_nobody(tmp_path):
    assert processes.is_first()
    assert processes.by_the_first(lambda: 3) == processes.in_all(lambda: 3) == 3
    assert [processes.any_of(flag) for flag in (True, False)] == [True, False]
    rules = models.MeshRules(models.make_mesh(fsdp=2))
    placed = processes.to_devices({"x": np.arange(4.0, dtype=np.float32)}, rules)["x"]
    assert placed.sharding.is_fully_replicated
    assert len(placed.devices()) == 2
    np.testing.assert_array_equal(processes.to_the_first({"x": placed})["x"], np.arange(4))
    assert Cluster() == Cluster(None, None, None)
