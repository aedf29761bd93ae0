"""Checkpoints in the background: which stay, what is never touched, what a full disk does."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny import OPTIMIZER, make_model

from models import arrays
from train import checkpoint, keeping
from train.keeping import Keeper
from train.progress import RunState
from train.run_config import SavingConfig
from train.state import init_state


@pytest.fixture(scope="module")
def run():
    return RunState(init_state(make_model(), OPTIMIZER, 0))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kept(folder, run, steps, saving, said=None):
    with Keeper(folder, saving, (said if said is not None else []).append) as keeper:
        for step in steps:
            keeper.save(step, run)
        keeper.finish()


def test_the_newest_stay_and_every_so_many_for_good(run, tmp_path):
    kept(tmp_path, run, range(1, 8), SavingConfig(keep_last=2, keep_every=3))
    assert checkpoint.finished_steps(tmp_path) == [3, 6, 7]
    assert names(tmp_path) == sorted(
        ["run.json", *(f"{step}{suffix}" for step in (3, 6, 7) for suffix in ("", ".files.json", ".run.json"))]
    )


def test_nothing_that_the_run_did_not_write_is_ever_deleted(run, tmp_path):
    """FAULTS P71: copied checkpoints, unfinished ones, files within ours, names that only look like steps."""
    other = tmp_path / "other"
    kept(other, run, [1], SavingConfig())
    folder = tmp_path / "own"
    folder.mkdir()
    for suffix in ("", ".files.json", ".run.json"):
        (other / f"1{suffix}").rename(folder / f"1{suffix}")
    (folder / "2").mkdir()
    (folder / "2" / "data").write_text("half a copy, without its list")
    (folder / "3.orbax-checkpoint-tmp").mkdir()
    (folder / "3.orbax-checkpoint-tmp" / "data").write_text("as Orbax names what it has begun")
    (folder / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    kept(folder, run, [4], SavingConfig(keep_last=1))
    (folder / "4" / "mine.txt").write_text("put there by somebody")
    kept(folder, run, [5, 6], SavingConfig(keep_last=1))
    assert {path: path.read_bytes() for path in before} == before
    assert checkpoint.finished_steps(folder) == [1, 6], "a copy is another run's, whose name it bears"
    assert [path.name for path in (folder / "4").rglob("*")] == ["mine.txt"]


def test_a_step_that_somebody_began_is_set_aside_not_deleted(run, tmp_path):
    for name in ("3.orbax-checkpoint-tmp", "3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(name)
    kept(tmp_path, run, [3], SavingConfig())
    assert checkpoint.finished_steps(tmp_path) == [3]
    held = {path.read_text() for path in tmp_path.rglob("data")}
    assert {"3", "3.orbax-checkpoint-tmp"} <= held


def test_a_deletion_that_a_kill_cut_short_is_finished_by_the_next_start(run, tmp_path):
    kept(tmp_path, run, [1, 2], SavingConfig())
    (tmp_path / "1.files.json").rename(tmp_path / "1.deleting.json")
    next(path for path in (tmp_path / "1").rglob("*") if path.is_file()).unlink()
    kept(tmp_path, run, [], SavingConfig())
    assert names(tmp_path) == ["2", "2.files.json", "2.run.json", "run.json"]


def test_what_is_saved_is_what_was_there_when_it_was_asked(run, tmp_path, monkeypatch):
    """The next iteration donates the very buffers; the write begins only afterwards."""
    write, given = keeping.write, []
    monkeypatch.setattr(keeping, "write", lambda *arguments: given.append(arguments))
    with Keeper(tmp_path, SavingConfig(), print) as keeper:
        state = init_state(make_model(seed=3), OPTIMIZER, 1)
        before = [np.array(leaf) for leaf in jax.tree.leaves(state.model)]
        keeper.save(1, RunState(state))
        jax.jit(lambda model: jax.tree.map(lambda leaf: leaf * 0 - 1, model), donate_argnums=0)(state.model)
    write(*given[0])
    restored = checkpoint.restore(tmp_path, 1, run).train.model
    for one, other in zip(jax.tree.leaves(restored), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_full_disk_is_told_of_and_the_run_goes_on(run, tmp_path, monkeypatch):
    write, said, full = keeping.write, [], [True, False, True]

    def writes(*arguments):
        if full.pop(0):
            raise OSError("no space left on device")
        return write(*arguments)

    monkeypatch.setattr(keeping, "write", writes)
    kept(tmp_path, run, [1, 2], SavingConfig(), said)
    assert said == ["a checkpoint could not be written: no space left on device"]
    assert checkpoint.finished_steps(tmp_path) == [2]
    with pytest.raises(OSError, match="the last checkpoint could not be written: no space left on device"):
        kept(tmp_path, run, [3], SavingConfig(), said)
    assert checkpoint.finished_steps(tmp_path) == [2]


def test_what_a_failed_write_began_takes_no_room(run, tmp_path, monkeypatch):
    """What others began stays, as ever."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "data").write_text("half a copy")

    def is_full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(arrays, "write_whole", is_full)
        with pytest.raises(OSError, match="could not be written: no space left"):
            kept(tmp_path, run, [1], SavingConfig())
    assert names(tmp_path) == ["1.unfinished-1", "run.json"]
    assert (tmp_path / "1.unfinished-1" / "data").read_text() == "half a copy"
    kept(tmp_path, run, [1], SavingConfig())
    assert checkpoint.finished_steps(tmp_path) == [1]


def test_a_damaged_list_deletes_nothing_and_stops_nobody(run, tmp_path):
    kept(tmp_path, run, [1], SavingConfig(keep_last=1))
    (tmp_path / "1.files.json").write_text("")
    files = set((tmp_path / "1").rglob("*"))
    kept(tmp_path, run, [2], SavingConfig(keep_last=1))
    kept(tmp_path, run, [3], SavingConfig(keep_last=1))
    assert checkpoint.finished_steps(tmp_path) == [3]
    assert set((tmp_path / "1").rglob("*")) == files


def test_a_step_that_another_run_has_written_is_told_of(run, tmp_path):
    kept(tmp_path, run, [1], SavingConfig())
    (tmp_path / "1.run.json").write_text("another")
    said = []
    with pytest.raises(OSError, match="1 is another run's, and is never overwritten"):
        kept(tmp_path, run, [1], SavingConfig(), said)
    assert len(said) == 1
    assert (tmp_path / "1.run.json").read_text() == "another"


def test_a_checkpoint_names_its_run(run, tmp_path):
    kept(tmp_path, run, [1], SavingConfig())
    known = json.loads((tmp_path / "run.json").read_text())["run"]
    assert (tmp_path / "1.run.json").read_text() == known
    kept(tmp_path, dataclasses.replace(run), [2], SavingConfig())
    assert (tmp_path / "2.run.json").read_text() == known, "the same run when it goes on"
