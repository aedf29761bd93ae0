import dataclasses
import functools
import io
import json
import os
import shutil
import signal

import numpy as np
import pytest
from rich.console import Console

from models import lora
from train import build, checkpoint, cli, report, run, trackers, training
from train.config import GRPOConfig
from train.run_config import EvaluationConfig, RunConfig, SavingConfig, WatchConfig

# With a price on the KL, so that a resumed run must find the reference again.
GRPO = GRPOConfig(
    num_prompts=4,
    group_size=4,
    max_new_tokens=5,
    top_k=4,
    top_p=0.9,
    schedule="cosine",
    kl_coefficient=0.1,
    reference_every=3,
    ema_decay=0.9,
)
CONFIG = RunConfig(
    preset="sort-tiny",
    iterations=4,
    grpo=GRPO,
    evaluation=EvaluationConfig(eval_every=2, eval_prompts=20, eval_samples=2),
    saving=SavingConfig(checkpoint_every=2),
    watch=WatchConfig(sample_every=2, num_samples=3),
)


def console():
    return Console(file=io.StringIO(), width=120)


def saved_arrays(folder, step):
    saved = checkpoint.restore(folder / "checkpoints", step, build.build(CONFIG).run)
    return {name: np.asarray(leaf) for name, leaf in checkpoint.named_leaves(saved).items()}


@pytest.fixture(scope="module", autouse=True)
def one_program_per_config():
    """Optimisers are static: a new one is a new program, for every run and every resume."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_optimizer", functools.cache(build.make_optimizer))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four iterations, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    screen = console()
    run.start(CONFIG, folder, screen)
    return folder, screen.file.getvalue()


@pytest.mark.slow
def test_a_run_leaves_its_folder(whole):
    folder, text = whole
    assert RunConfig.from_json((folder / "config.json").read_text()) == CONFIG
    rows = report.read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(np.isfinite(value).all() for row in rows for value in row.values())
    assert [row["step"] for row in rows if "eval/greedy" in row] == [0, 2, 4], "the last one after the last iteration"
    assert {"eval/greedy", "eval/pass@1", "eval/pass@2", "time/evaluation", "step"} == set(rows.pop())
    assert [row["step"] for row in rows if "support/kept_mass" in row] == [0, 2]
    assert all(0.5 < row["support/kept_mass"] < 1 for row in rows[::2])
    assert all(row["ratio/max_error"] <= 1e-5 for row in rows)
    assert rows[0]["kl"] == 0, "the reference is the policy that a run starts with"
    assert rows[2]["kl"] > 0
    assert rows[3]["kl"] == 0, "and, from the third update on, the one it had then"
    assert all(row["staleness/mean"] == 0 for row in rows)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (folder / "report.html").read_text()
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0] * 3 + [2] * 3 + [4] * 3
    for sample in samples:
        assert len(sample["token_ids"]) == len(sample["sampling_mask"]) == len(sample["logprobs"]) == 5
        assert all(token in mask for token, mask in zip(sample["token_ids"], sample["sampling_mask"], strict=True))
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["2", "2.files.json", "2.run.json", "4", "4.files.json", "4.run.json", "run.json"]
    for word in ("largest |ratio - 1|", "curves.png", "report.html", "checkpoints/4", "exact answers", "held-out"):
        assert word in text


def timeless(folder):
    rows = report.read_metrics(folder / "metrics.jsonl")
    return [
        {name: value for name, value in row.items() if "second" not in name and "time/" not in name} for row in rows
    ]


def same_runs(one, other, step=4):
    """Arrays, progress, metrics and samples are the same, bit for bit."""
    ours, theirs = saved_arrays(one, step), saved_arrays(other, step)
    assert list(ours) == list(theirs)
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)
    assert timeless(one) == timeless(other)
    lines = [(folder / "samples.jsonl").read_text().splitlines() for folder in (one, other)]
    # A killed run may have written some of them twice.
    assert list(dict.fromkeys(lines[0])) == list(dict.fromkeys(lines[1]))


@pytest.mark.slow
def test_half_a_run_resumed_is_the_whole_run(whole, tmp_path, monkeypatch):
    folder = tmp_path / "half"
    iterate, calls = training._iterated, []

    def stops_after_two(*arguments):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(arguments)
        return iterate(*arguments)

    monkeypatch.setattr(training, "_iterated", stops_after_two)
    with pytest.raises(KeyboardInterrupt, match="goes on after iteration 2"):
        run.start(CONFIG, folder, console())
    monkeypatch.setattr(training, "_iterated", iterate)
    run.resume(folder, None, console())
    same_runs(whole[0], folder)


@pytest.mark.slow
def test_sigterm_lets_the_iteration_finish_and_the_run_goes_on_from_there(whole, tmp_path, monkeypatch):
    """The checkpoint is of an iteration that has none otherwise."""
    folder, screen = tmp_path / "ended", console()
    iterate = training._iterated

    def is_told(training, run, step, row):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(training, run, step, row)

    monkeypatch.setattr(training, "_iterated", is_told)
    before = signal.getsignal(signal.SIGTERM)
    run.start(CONFIG, folder, screen)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "stopped by SIGTERM after iteration 3; --resume" in screen.file.getvalue()
    assert checkpoint.finished_steps(folder / "checkpoints") == [2, 3]
    monkeypatch.setattr(training, "_iterated", iterate)
    run.resume(folder, None, console())
    same_runs(whole[0], folder)


@pytest.mark.slow
def test_a_torn_line_and_a_new_total_survive_a_resume(whole, tmp_path, monkeypatch):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    # The schedule of another total is another program, and what an iteration does is of no matter here.
    last = report.read_metrics(folder / "metrics.jsonl")[-2]
    monkeypatch.setattr(training, "_iterated", lambda training, run, step, row: (run, last | {"step": step}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewards/me')
    run.resume(folder, 5, console())
    assert [row["step"] for row in report.read_metrics(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert RunConfig.from_json((folder / "config.json").read_text()).iterations == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluation", "step", "reason"),
    [
        (EvaluationConfig(1, 20, early_stop_target=0.5), 2, "the greedy share of right answers, 0.500, has reached"),
        (EvaluationConfig(1, 20, early_stop_patience=2), 4, "2 evaluations without one better than 0.600"),
    ],
)
def test_a_run_stops_early_and_so_does_a_resumed_one(tmp_path, monkeypatch, evaluation, step, reason):
    scores = iter([0.1, 0.2, 0.6, 0.5, 0.6, 0.4] if evaluation.early_stop_patience else [0.1, 0.2, 0.5])
    seen = []
    monkeypatch.setattr(training, "evaluate", lambda *_: seen.append(next(scores)) or {"eval/greedy": seen[-1]})
    config = dataclasses.replace(CONFIG, iterations=8, evaluation=evaluation, grpo=GRPO, watch=WatchConfig())
    screen = console()
    folder = run.start(config, tmp_path / "run", screen)
    assert f"stopped before iteration {step + 1}: {reason}" in " ".join(screen.file.getvalue().split())
    assert checkpoint.latest_step(folder / "checkpoints") == step
    monkeypatch.setattr(training, "evaluate", lambda *_: {"eval/greedy": seen[-1]})
    screen = console()
    run.resume(folder, None, screen)
    assert f"stopped before iteration {step + 1}: {reason}" in " ".join(screen.file.getvalue().split())
    assert len(report.read_metrics(folder / "metrics.jsonl")) == step + 1


@pytest.mark.slow
def test_a_run_never_writes_over_another(whole):
    before = {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="is not empty"):
        run.start(CONFIG, whole[0], console())
    assert {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_run_that_is_lost_leaves_its_good_checkpoints(whole, tmp_path, monkeypatch):
    last = report.read_metrics(whole[0] / "metrics.jsonl")[-2]
    shutil.copytree(whole[0], tmp_path / "run")
    lost = {"grad_norm": float("nan")}
    monkeypatch.setattr(training, "_iterated", lambda training, run, step, row: (run, last | lost))
    with pytest.raises(FloatingPointError, match="grad_norm of iteration 4 is nan; nothing of it is saved"):
        run.resume(tmp_path / "run", 9, console())
    assert checkpoint.finished_steps(tmp_path / "run" / "checkpoints") == [2, 4]


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_resume(whole):
    with pytest.raises(ValueError, match="has done 4 of 4 iterations"):
        run.resume(whole[0], None, console())


@pytest.mark.slow
def test_a_run_that_was_ended_behind_its_last_checkpoint_leaves_what_is_missing(whole, tmp_path, monkeypatch):
    """Killed while it evaluated, drew or exported; or told to end in its last iteration."""
    folder = shutil.copytree(whole[0], tmp_path / "run")
    for name in ("ended.json", "report.html", "curves.png"):
        (folder / name).unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    monkeypatch.setattr(training, "_iterated", None)
    run.resume(folder, None, console())
    same_runs(whole[0], folder)
    assert {path.name for path in whole[0].iterdir()} == {path.name for path in folder.iterdir()}
    with pytest.raises(ValueError, match="has done 4 of 4 iterations"):
        run.resume(folder, None, console())
    with pytest.raises(ValueError, match="has done 4 of 3 iterations"):
        run.resume(folder, 3, console())


@pytest.mark.slow
def test_checkpoints_without_their_lists_are_said_to_be_incomplete(whole, tmp_path, monkeypatch):
    """FAULTS P71: copied without what makes them checkpoints."""
    folder, screen = shutil.copytree(whole[0], tmp_path / "run"), console()
    for step in (2, 4):
        (folder / "checkpoints" / f"{step}.files.json").unlink()

    def stops(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_iterated", stops)
    with pytest.raises(KeyboardInterrupt):
        run.resume(folder, None, screen)
    for step in (2, 4):
        assert f"{folder / 'checkpoints' / str(step)} is incomplete, and is passed over" in screen.file.getvalue()
        assert (folder / "checkpoints" / str(step)).is_dir()
    assert "from its beginning, since it has no finished checkpoint" in screen.file.getvalue()


def test_a_file_that_is_nested_without_end_is_named(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is damaged: it is nested too deeply"):
        run.resume(tmp_path, None, console())
    (tmp_path / "metrics.jsonl").write_text("[" * 100_000 + '\n{"step": 0}\n')
    assert report.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0}]


def test_damaged_run_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run: .*config.json is missing"):
        run.resume(tmp_path, None, console())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is damaged"):
        run.resume(tmp_path, None, console())


def test_new_folders_are_claimed(tmp_path):
    names = [run.new_folder(tmp_path / "runs", "sort-tiny").name for _ in range(3)]
    assert names == ["sort-tiny-001", "sort-tiny-002", "sort-tiny-003"]


def test_a_run_that_another_one_overtakes_stops(tmp_path, monkeypatch):
    build_run = run.build

    def overtaken(config):
        (tmp_path / "config.json").write_text("the other's")
        return build_run(config)

    monkeypatch.setattr(run, "build", overtaken)
    with pytest.raises(ValueError, match="taken by another run"):
        run.start(CONFIG, tmp_path, console())
    assert (tmp_path / "config.json").read_text() == "the other's"


def test_a_tracker_that_is_not_installed_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_PACKAGES", {"wandb": ("no_such_package", "wandb")})
    with pytest.raises(ValueError, match=r"tracker wandb needs the package no_such_package: pip install"):
        run.start(dataclasses.replace(CONFIG, watch=WatchConfig(("wandb",))), tmp_path / "run", console())
    assert not (tmp_path / "run").exists()


def test_completions_that_do_not_fit_the_model_leave_no_folder(tmp_path):
    long = dataclasses.replace(CONFIG, grpo=dataclasses.replace(GRPO, max_new_tokens=100))
    with pytest.raises(ValueError, match=r"max_new_tokens must be at most 58 .* got 100"):
        run.start(long, tmp_path / "run", console())
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_fit_the_task_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="model must be 'tiny', got 'huge'"):
        run.start(dataclasses.replace(CONFIG, model="huge"), tmp_path / "run", console())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_of_adapters_is_resumed_bit_for_bit_and_leaves_them(tmp_path):
    """The adapters saved at the end are those of the unbroken run; the ratio starts at one, the KL from the base."""
    config = dataclasses.replace(
        CONFIG,
        iterations=2,
        lora_rank=2,
        lora_targets=("query", "up"),
        grpo=dataclasses.replace(GRPO, reference_every=0, ema_decay=0.5),
        evaluation=EvaluationConfig(),
        saving=SavingConfig(checkpoint_every=1),
        watch=WatchConfig(),
    )
    folder = run.start(config, tmp_path / "run", console())
    rows = report.read_metrics(folder / "metrics.jsonl")
    assert all(row["ratio/max_error"] <= 1e-5 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    whole = (folder / "adapters-2" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(folder / "adapters-2")
    shutil.rmtree(folder / "checkpoints" / "2")
    (folder / "checkpoints" / "2.files.json").unlink()
    run.resume(folder, None, console())
    assert (folder / "adapters-2" / "adapter_model.safetensors").read_bytes() == whole
    average = (folder / "average-2" / "adapter_model.safetensors").read_bytes()
    assert len(average) == len(whole)
    assert average != whole
    first = build.build(config).run.train
    assert lora.load(lora.detach(first.model), folder / "adapters-2").config == first.model.config


def _remove_everything(path):
    shutil.rmtree(path)


def _truncate_data(path):
    for file in path.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])


def _flip_a_bit(path):
    file = max(path.rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _damage_metadata(path):
    (path / "_METADATA").write_text("{")


def _damage_list(path):
    path.with_name(f"{path.name}.files.json").write_text("[")


DAMAGES = [_remove_everything, _truncate_data, _flip_a_bit, _damage_metadata, _damage_list]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(whole, tmp_path, monkeypatch, damage):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    checkpoints = folder / "checkpoints"
    damage(checkpoints / "4")
    before = {path.name: path.read_bytes() for path in checkpoints.glob("4/**/*") if path.is_file()}
    seen, screen = [], console()
    monkeypatch.setattr(run, "train", lambda *_, first_step, **__: seen.append(first_step))
    run.resume(folder, 6, screen)
    assert seen == [2]
    said = " ".join(screen.file.getvalue().split())
    assert "checkpoints/4 is damaged or does not fit this run" in said
    assert "it is set aside as 4.damaged-1, and step 2 is used" in said
    assert checkpoint.finished_steps(checkpoints) == [2]
    aside = checkpoints / "4.damaged-1"
    assert {path.name: path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_where_every_checkpoint_is_damaged_nothing_is_touched(whole, tmp_path, capfd):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    for step in (2, 4):
        _flip_a_bit(folder / "checkpoints" / str(step))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert cli.main(["--resume", str(folder), "--iterations", "6"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: checkpoint ")
    assert "checkpoints/4 is damaged or does not fit this run" in said
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
