"""Kill -9 at 20 random moments: what is resumed each time ends where the unbroken run ends, bit for bit."""

import json
import multiprocessing
import random
import time

import numpy as np
import pytest
from rich.console import Console

from train import checkpoint, finishing, report
from train.build import build
from train.config import GRPOConfig
from train.run_config import EvaluationConfig, RunConfig, SavingConfig, WatchConfig

NUM_KILLS = 20
CONFIG = RunConfig(
    preset="sort-tiny",
    iterations=60,
    grpo=GRPOConfig(num_prompts=4, group_size=4, max_new_tokens=5, top_k=4, top_p=0.9, schedule="cosine"),
    evaluation=EvaluationConfig(eval_every=25, eval_prompts=8),
    saving=SavingConfig(checkpoint_every=4, keep_last=2, keep_every=20),
    watch=WatchConfig(sample_every=25, num_samples=1),
)


def trained(config, folder, cache):
    """What `python -m train` does, in a process of its own; programs compile once for all of them."""
    import jax

    from train import run

    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    console = Console(quiet=True)
    if (folder / "config.json").exists():
        run.resume(folder, None, console)
    else:
        run.start(config, folder, console)


@pytest.fixture(scope="module")
def processes():
    """Children begin where the imports are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.run"])
    return context


def arrays(folder):
    step = checkpoint.latest_step(folder / "checkpoints")
    saved = checkpoint.restore(folder / "checkpoints", step, build(CONFIG).run)
    return step, {name: np.asarray(leaf) for name, leaf in checkpoint.named_leaves(saved).items()}


def timeless(folder):
    rows = report.read_metrics(folder / "metrics.jsonl")
    return [{name: v for name, v in row.items() if "second" not in name and "time/" not in name} for row in rows]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_the_unbroken_one(tmp_path, processes):
    cache = tmp_path / "programs"
    for attempt in range(2):
        # The second one says how long a run takes whose programs are there.
        started = time.monotonic()
        child = processes.Process(target=trained, args=(CONFIG, tmp_path / f"whole-{attempt}", cache))
        child.start()
        child.join(timeout=600)
        assert child.exitcode == 0
    whole, seconds = tmp_path / "whole-1", time.monotonic() - started
    moments, reached, killed_runs = random.Random(0), [], []
    while len(reached) < NUM_KILLS:
        # One that came to its end too early is followed by another.
        killed_runs.append(tmp_path / f"killed-{len(killed_runs)}")
        reached += kill_until_it_ends(processes, killed_runs[-1], cache, moments, seconds, NUM_KILLS - len(reached))
    assert len(set(reached)) > 2, "some kills came while it trained"
    for killed in killed_runs:
        same_runs(whole, killed)


def kill_until_it_ends(processes, folder, cache, moments, seconds, most):
    """The steps that were saved at each of the kills, at most so many."""
    reached = []
    while True:
        child = processes.Process(target=trained, args=(CONFIG, folder, cache))
        child.start()
        child.join(timeout=moments.uniform(0.2, 0.9) * seconds if len(reached) < most else 600)
        if child.exitcode is not None:
            assert child.exitcode == 0
            return reached
        child.kill()
        child.join()
        reached.append(max(checkpoint.finished_steps(folder / "checkpoints"), default=0))
        # Killed on its way out.
        if finishing.has_ended(folder, CONFIG.iterations):
            return reached


def same_runs(whole, killed):
    (step, ours), (other_step, theirs) = arrays(whole), arrays(killed)
    assert step == other_step == CONFIG.iterations
    assert list(ours) == list(theirs)
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)
    assert timeless(whole) == timeless(killed)
    # What policy keeps, and nothing of what was swept away.
    steps = checkpoint.finished_steps(killed / "checkpoints")
    assert steps == checkpoint.finished_steps(whole / "checkpoints")
    assert steps == [20, 40, 56, 60]
    assert not list((killed / "checkpoints").glob("*.deleting.json"))
    assert json.loads((killed / "config.json").read_text()) == json.loads(CONFIG.to_json())
