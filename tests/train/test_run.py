import dataclasses
import functools
import io
import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from models import lora
from train import build, checkpoint, cli, report, run
from train.config import GRPOConfig, RunConfig

# With a price on the KL, so that a resumed run must find the reference again.
GRPO = GRPOConfig(
    num_prompts=4, group_size=4, max_new_tokens=5, top_k=4, top_p=0.9, schedule="cosine", kl_coefficient=0.1
)
CONFIG = RunConfig(preset="sort-tiny", task="sort", model="tiny", iterations=4, checkpoint_every=2, grpo=GRPO)


def console():
    return Console(file=io.StringIO(), width=120)


def saved_arrays(folder, step):
    _, _, like = run.build(CONFIG)
    state = checkpoint.restore(folder / "checkpoints", step, like)
    return [np.asarray(jax.random.key_data(leaf) if leaf is state.key else leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module", autouse=True)
def one_program_per_config():
    """The same iteration would be compiled again for every run and every resume.

    Optimisers are static, so a new one is a new program; so are arrays that lie on a device by request, as those of a
    checkpoint do.
    """
    init_state = build.init_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_optimizer", functools.cache(build.make_optimizer))
        patch.setattr(build, "init_state", lambda *given: jax.device_put(init_state(*given), jax.devices()[0]))
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
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(np.isfinite(value).all() for row in rows for value in row.values())
    assert all(row["ratio/max_error"] <= 1e-5 for row in rows)
    assert rows[0]["kl"] == 0, "the reference is the policy that a run starts with"
    assert rows[3]["kl"] > 0
    assert all(row["staleness/mean"] == 0 for row in rows)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    for sample in samples:
        assert len(sample["token_ids"]) == len(sample["sampling_mask"]) == len(sample["logprobs"]) == 5
        assert all(token in mask for token, mask in zip(sample["token_ids"], sample["sampling_mask"], strict=True))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "2",
        "2.files.json",
        "4",
        "4.files.json",
    ]
    for word in ("largest |ratio - 1|", "curves.png", "checkpoints/4", "exact answers"):
        assert word in text


@pytest.mark.slow
def test_half_a_run_resumed_is_the_whole_run(whole, tmp_path, monkeypatch):
    folder = tmp_path / "half"
    iterate, calls = run._timed, []

    def stops_after_two(*arguments):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(arguments)
        return iterate(*arguments)

    monkeypatch.setattr(run, "_timed", stops_after_two)
    with pytest.raises(KeyboardInterrupt, match="goes on after iteration 2"):
        run.start(CONFIG, folder, console())
    monkeypatch.setattr(run, "_timed", iterate)
    run.resume(folder, None, console())
    for one, other in zip(saved_arrays(whole[0], 4), saved_arrays(folder, 4), strict=True):
        np.testing.assert_array_equal(one, other)
    timeless = [
        [{name: value for name, value in row.items() if "second" not in name} for row in rows]
        for rows in (report.read_metrics(whole[0] / "metrics.jsonl"), report.read_metrics(folder / "metrics.jsonl"))
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.slow
def test_a_torn_line_and_a_new_total_survive_a_resume(whole, tmp_path, monkeypatch):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    # The schedule of another total is another program, and what an iteration does is of no matter here.
    last = report.read_metrics(folder / "metrics.jsonl")[-1]
    monkeypatch.setattr(run, "_timed", lambda loop, state, step: (state, last | {"step": step}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewards/me')
    run.resume(folder, 5, console())
    assert [row["step"] for row in report.read_metrics(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert RunConfig.from_json((folder / "config.json").read_text()).iterations == 5
    with pytest.raises(ValueError, match="has done 5 of 5 iterations"):
        run.resume(folder, None, console())


@pytest.mark.slow
def test_a_run_never_writes_over_another(whole):
    before = {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="is not empty"):
        run.start(CONFIG, whole[0], console())
    assert {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_resume(whole):
    with pytest.raises(ValueError, match="has done 4 of 4 iterations"):
        run.resume(whole[0], None, console())


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
    build = run.build

    def overtaken(config):
        (tmp_path / "config.json").write_text("the other's")
        return build(config)

    monkeypatch.setattr(run, "build", overtaken)
    with pytest.raises(ValueError, match="taken by another run"):
        run.start(CONFIG, tmp_path, console())
    assert (tmp_path / "config.json").read_text() == "the other's"


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
def test_a_run_of_adapters_is_resumed_bit_for_bit_and_leaves_them(tmp_path, monkeypatch):
    """The adapters saved at the end are those of the unbroken run; the ratio starts at one, the KL from the base."""
    config = dataclasses.replace(CONFIG, iterations=2, checkpoint_every=1, lora_rank=2, lora_targets=("query", "up"))
    folder = run.start(config, tmp_path / "run", console())
    rows = report.read_metrics(folder / "metrics.jsonl")
    assert all(row["ratio/max_error"] <= 1e-5 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    whole = (folder / "adapters" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(folder / "adapters")
    shutil.rmtree(folder / "checkpoints" / "2")
    (folder / "checkpoints" / "2.files.json").unlink()
    run.resume(folder, None, console())
    assert (folder / "adapters" / "adapter_model.safetensors").read_bytes() == whole
    _, _, first = run.build(config)
    assert lora.load(lora.detach(first.model), folder / "adapters").config == first.model.config


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
    path.with_name("4.files.json").write_text("[")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [_remove_everything, _truncate_data, _flip_a_bit, _damage_metadata, _damage_list])
def test_a_damaged_checkpoint_is_refused_in_one_line_and_left_alone(whole, tmp_path, capfd, damage):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    damage(folder / "checkpoints" / "4")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert cli.main(["--resume", str(folder), "--iterations", "6"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: checkpoint ")
    assert "checkpoints/4 is damaged or does not fit this run" in said
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
