import importlib.util
import json
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from train import trackers
from train.report import read_metrics
from train.trackers import TensorBoard, Trackers

ROWS = [{"rewards/mean": 0.25 * step, "support/histogram": [5, 0, 3]} for step in range(3)]


def events(folder):
    """All events of all files, by first step; a record is its length, a checksum, itself and another checksum."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda path: path.name.split(".")[-2]):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_lines_are_on_disk_when_log_returns_and_a_torn_one_is_ended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "rewards/mean": 1.0}\n{"step": 1, "rew')
    with Trackers(tmp_path, [], {}) as open_trackers:
        open_trackers.log(1, {"rewards/mean": 0.5, "step": 1})
        assert [row["step"] for row in read_metrics(path)] == [0, 1]
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 1, "rewards/mean": 0.5}


def test_tensorboard_holds_scalars_and_histograms_and_hides_steps_done_again(tmp_path):
    for steps in ((0, 1, 2), (1, 2)):
        with Trackers(tmp_path, ["tensorboard"], {}) as open_trackers:
            for step in steps:
                open_trackers.log(step, ROWS[step])
    found = events(tmp_path)
    assert [event.step for event in found if event.summary.value] == [0, 1, 2, 1, 2]
    starts = [event.step for event in found if event.session_log.status == SessionLog.START]
    assert starts == [0, 1], "what a file of another start says of step 1 and later counts no more"
    reward, sizes = found[-1].summary.value
    assert (reward.tag, reward.simple_value) == ("rewards/mean", 0.5)
    assert list(sizes.histo.bucket_limit) == [1, 2, 4]
    assert list(sizes.histo.bucket) == [5, 0, 3]
    assert (sizes.histo.num, sizes.histo.max) == (8, 4)


def test_a_tracker_that_fails_is_left_out_with_one_warning(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    with Trackers(tmp_path, ["tensorboard"], {}) as open_trackers:
        open_trackers.log(0, ROWS[0])
        monkeypatch.setattr(TensorBoard, "log", full)
        with pytest.warns(RuntimeWarning, match="tensorboard failed and is left out.*no space left"):
            open_trackers.log(1, ROWS[1])
        # Warnings are errors here: there is no second one, neither now nor at the end.
        open_trackers.log(2, ROWS[2])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_trackers_that_cannot_start_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="trackers must be some of tensorboard, wandb, got 'mlflow'"):
        Trackers(tmp_path, ["mlflow"], {})
    (tmp_path / "tensorboard").write_text("not a folder")
    with pytest.raises(ValueError, match="tracker tensorboard did not start"):
        Trackers(tmp_path, ["tensorboard"], {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tracker wandb needs the package wandb: pip install 'jaxmask\[wandb\]'"):
        Trackers(tmp_path, ["wandb"], {})


@pytest.mark.slow
def test_weights_and_biases_writes_offline_and_goes_on_with_its_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for steps in ((0, 1), (2,)):
        with Trackers(tmp_path, ["wandb"], {"preset": "sort-tiny", "grpo": {"top_k": 4}}) as open_trackers:
            for step in steps:
                open_trackers.log(step, ROWS[step])
    run_id = (tmp_path / "wandb" / "id").read_text()
    files = list((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert files
    written = b"".join(path.read_bytes() for path in files)
    assert all(word in written for word in (b"rewards/mean", b"top_k", trackers.WANDB_PROJECT.encode()))
