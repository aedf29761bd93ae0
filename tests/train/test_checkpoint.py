import jax
import numpy as np
import pytest
from tiny import CONFIG, OPTIMIZER, TASK, make_model

from train import checkpoint
from train.progress import Progress, RunState
from train.run_config import EvaluationConfig
from train.state import init_state
from train.step import train_iteration
from train.tasks.base import Cursor

# Not what a run begins with.
PROGRESS = Progress(Cursor(2, 7), Cursor(2, 3), 0.375, 4)


def arrays(state):
    return [np.asarray(jax.random.key_data(leaf) if leaf is state.key else leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
def test_a_restored_state_is_the_saved_one_and_trains_on_alike(state, tmp_path):
    # Where a restored one lies, too: lying there by request is part of a program.
    state = jax.device_put(state, jax.devices()[0])
    state, _ = train_iteration(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    saved = [leaf.copy() for leaf in arrays(state)]
    path = checkpoint.save(tmp_path / "checkpoints", 1, RunState(state, PROGRESS))
    assert path.is_dir()
    fresh = RunState(init_state(make_model(seed=9), OPTIMIZER, seed=8))
    step = checkpoint.latest_step(tmp_path / "checkpoints")
    run = checkpoint.restore(tmp_path / "checkpoints", step, fresh)
    assert run.progress == PROGRESS
    restored = run.train
    for one, other in zip(saved, arrays(restored), strict=True):
        np.testing.assert_array_equal(one, other)
    on, _ = train_iteration(state, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    also, _ = train_iteration(restored, task=TASK, config=CONFIG, optimizer=OPTIMIZER)
    for one, other in zip(arrays(on), arrays(also), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_checkpoint_is_never_overwritten(state, tmp_path):
    checkpoint.save(tmp_path, 1, RunState(state))
    with pytest.raises(ValueError, match="exists already"):
        checkpoint.save(tmp_path, 1, RunState(state))


def test_unfinished_writes_are_passed_over_and_left(state, tmp_path):
    checkpoint.save(tmp_path, 2, RunState(state))
    (tmp_path / "3.orbax-checkpoint-tmp-17").mkdir()
    (tmp_path / "4").mkdir()
    (tmp_path / "5.files.json.part").write_text("{")
    assert checkpoint.latest_step(tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 6, "what is not understood stays"


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_no_checkpoint_is_said_so(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no finished checkpoint"):
        checkpoint.latest_step(tmp_path / name)


def test_a_checkpoint_of_another_shape_is_refused(state, tmp_path):
    checkpoint.save(tmp_path, 1, RunState(state))
    with pytest.raises(ValueError, match=r"array \.model.* has shape \(11, 16\), not \(11, 24\)") as caught:
        checkpoint.restore(tmp_path, 1, RunState(init_state(make_model(width=24), OPTIMIZER, 0)))
    assert "\n" not in str(caught.value)


def test_a_folder_without_its_list_is_set_aside(state, tmp_path):
    """A run killed between the folder and the list must be able to write that step again."""
    checkpoint.save(tmp_path, 4, RunState(state))
    (tmp_path / "4.files.json").unlink()
    checkpoint.save(tmp_path, 4, RunState(state))
    assert checkpoint.latest_step(tmp_path) == 4
    assert (tmp_path / "4.unfinished-1").is_dir()
    checkpoint.restore(tmp_path, 4, RunState(state))


def test_a_best_score_outlives_a_checkpoint_bit_for_bit(state, tmp_path):
    """0.7 is no float32: read back as the nearest one, it would make the next 0.7 a gain."""
    progress = Progress().after_evaluation(0.7)
    checkpoint.save(tmp_path, 1, RunState(state, progress))
    restored = checkpoint.restore(tmp_path, 1, RunState(state)).progress
    assert restored == progress
    assert restored.after_evaluation(0.7) == progress.after_evaluation(0.7)
    assert restored.after_evaluation(0.7).num_without_gain == 1
    assert restored.stops(EvaluationConfig(1, early_stop_target=0.7)) is not None
