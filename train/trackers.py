"""Where the metrics of a run go: JSON lines always, and TensorBoard and Weights & Biases where they are asked for."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from train.report import end_last_line

WANDB_PROJECT = "jaxmask"


@runtime_checkable
class Tracker(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Takes the metrics of a step: names to floats, or to lists of counts per power of two."""
        ...

    def close(self) -> None:
        """Ends the record."""
        ...


class Trackers:
    """All of a run's trackers; a context manager.

    One that fails while the run goes on is left out from then on, with one warning. The JSON lines are the run's own
    record, and what they raise ends the run.
    """

    def __init__(self, folder: Path, names: Sequence[str], config: Mapping[str, Any]):
        """Opens them; a run that goes on appends to what it has.

        Args:
          folder: of the run, which exists.
          names: of TRACKERS, besides the JSON lines.
          config: of the run, for those that show it.

        Raises:
          ValueError: a name that is not known, a package that is missing, or a tracker that does not start.
        """
        check(names)
        self._lines = JSONLines(folder)
        self._others: dict[str, Tracker] = {}
        for name in names:
            try:
                self._others[name] = TRACKERS[name](folder, config)
            except Exception as error:
                self.close()
                raise ValueError(f"tracker {name} did not start: {error}") from error

    def __enter__(self) -> Trackers:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes them all."""
        self.close()

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Writes a row of metrics; "step" is `step`, whatever the row says.

        Args:
          step: of the run, from 0.
          row: names to floats, or to lists of counts per power of two.
        """
        self._lines.log(step, row)
        for name, tracker in list(self._others.items()):
            self._guard(name, functools.partial(tracker.log, step, row))

    def close(self) -> None:
        """Ends all records."""
        self._lines.close()
        for name, tracker in list(self._others.items()):
            self._guard(name, tracker.close)
        self._others.clear()

    def _guard(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            failed = self._others.pop(name)
            with contextlib.suppress(Exception):
                failed.close()
            warnings.warn(f"tracker {name} failed and is left out from now on: {error!r}", RuntimeWarning, stacklevel=3)


class JSONLines:
    """metrics.jsonl: one object a line, on disk when `log` returns."""

    def __init__(self, folder: Path):
        """Goes on behind the last line, which it ends where a killed run left it unfinished."""
        path = folder / "metrics.jsonl"
        end_last_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        self._file.write(json.dumps({"step": step, **row} | {"step": step}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        self._file.close()


class TensorBoard:
    """tensorboard/: scalars, and histograms of counts per power of two.

    Not `SummaryWriter`: its thread dies of a full disk, and then the run waits for ever for room in its queue.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        """Events go to a file of their own for each start of the run; TensorBoard shows them as one."""
        import tensorboardX.event_file_writer

        self._folder = folder / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        self._open: Callable[..., Any] = tensorboardX.event_file_writer.EventsWriter
        self._writer: Any = None

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open(str(self._folder / "events"), f".{step}.{uuid.uuid4().hex[:8]}")
            # Steps that a killed run did beyond its last checkpoint are done again, and must not be shown twice.
            self._writer.write_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        values = [_tensorboard_value(name, value) for name, value in row.items() if name != "step"]
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """wandb/: a run of the project "jaxmask", offline unless WANDB_MODE says otherwise; `wandb sync` sends it later."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        """Begins the run, or goes on with it: its id lies in the folder."""
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        if mode != "online":
            # Else wandb reports its own errors over the network.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        (folder / "wandb").mkdir(exist_ok=True)
        self._histogram: Callable[..., Any] = wandb.Histogram
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._run = wandb.init(
                project=WANDB_PROJECT,
                name=folder.resolve().name,
                dir=str(folder),
                id=_saved_id(folder / "wandb" / "id"),
                resume="allow",
                mode=mode,
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
            )

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        shown = {name: self._value(value) for name, value in row.items() if name != "step"}
        self._run.log(shown, step=step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()

    def _value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return self._histogram(np_histogram=(value, [0.5, *(limit + 0.5 for limit in bucket_limits(len(value)))]))


TRACKERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
# What a tracker needs, and which extra brings it.
_PACKAGES = {"tensorboard": ("tensorboardX", "train"), "wandb": ("wandb", "wandb")}


def bucket_limits(num: int) -> list[int]:
    """The largest size in each bucket of a histogram of sizes: 1, 2, 4, 8, ..."""
    return [2**bucket for bucket in range(num)]


def check(names: Sequence[str]) -> None:
    """Makes sure that trackers are known and installed.

    Raises:
      ValueError: one is not; it is named.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"trackers must be some of {', '.join(TRACKERS)}, got {name!r}.")
        package, extra = _PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"tracker {name} needs the package {package}: pip install 'jaxmask[{extra}]'.")


def _saved_id(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        if saved := path.read_text(encoding="utf-8").strip():
            return saved
    new = uuid.uuid4().hex[:12]
    path.write_text(new, encoding="utf-8")
    return new


def _tensorboard_value(name: str, value: Any) -> Any:
    from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

    if not isinstance(value, list):
        return Summary.Value(tag=name, simple_value=value)
    limits = bucket_limits(len(value))
    largest = max((limit for limit, count in zip(limits, value, strict=True) if count), default=1)
    totals = [limit * count for limit, count in zip(limits, value, strict=True)]
    histogram = HistogramProto(
        min=1, max=largest, num=sum(value), sum=sum(totals), bucket_limit=limits, bucket=value,
        sum_squares=sum(limit * total for limit, total in zip(limits, totals, strict=True)),
    )  # fmt: skip
    return Summary.Value(tag=name, histo=histogram)
