"""What a worker process does: load the reward functions, call one at a time, and check what it returns.

Nothing is raised to the pool: errors come back as text, since an exception of someone's own may not survive the way.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_ERROR_LENGTH = 300
# Filled by `start`, once per process: the functions by name, or why one could not be loaded.
_loaded: dict[str, Callable[..., Any] | str] = {}


def start(targets: Mapping[str, str | Callable[..., Any]]) -> None:
    """Makes this process a worker, with functions by name: themselves, or "module:function" or "file.py:function"."""
    _live_and_die_with_the_run()
    for name, target in targets.items():
        try:
            _loaded[name] = load(target) if isinstance(target, str) else target
        except BaseException as error:  # importing runs someone's file
            _loaded[name] = _described(error)


def load(target: str) -> Callable[..., Any]:
    """The function that "module:function" or "file.py:function" names.

    Raises:
      ValueError: the module has no such function.
    """
    place, _, name = target.rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")
    return function


def check(target: str | Callable[..., Any], columns: Sequence[str]) -> str | None:
    """Why a function cannot be used with these columns, or None; for a process that ends when it is told."""
    try:
        return missing_columns(load(target) if isinstance(target, str) else target, columns)
    except BaseException as error:  # importing runs someone's file
        return _described(error)


def missing_columns(function: Callable[..., Any], columns: Sequence[str]) -> str | None:
    """Why a function cannot be called with these columns, or None."""
    takes = _takes(function)
    if takes is None:
        return None
    missing = [
        parameter.name
        for parameter in takes.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in {"prompts", "completions", *columns}
    ]
    return f"it takes {', '.join(missing)}; there are prompts, completions, {', '.join(columns)}" if missing else None


def call(name: str, prompts: list[str], completions: list[str], columns: Mapping[str, list[Any]]) -> list[float] | str:
    """The scores of completions by one function, or why there are none."""
    function = _loaded[name]
    if isinstance(function, str):
        return function
    try:
        values = function(**_accepted(function, {"prompts": prompts, "completions": completions, **columns}))
        return checked(values, len(completions))
    except BaseException as error:  # whatever someone's function raises, SystemExit too
        return _described(error)


def checked(values: Any, num: int) -> list[float]:
    """What a reward function returned, as finite floats.

    Raises:
      ValueError: it is not that many finite numbers.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"it must return a list of floats, it returned a {type(values).__name__}")
    scores = list(values)
    if len(scores) != num:
        raise ValueError(f"it must return {num} floats, one per completion, it returned {len(scores)}")
    for score in scores:
        if isinstance(score, (str, bytes)) or not hasattr(score, "__float__") or not math.isfinite(float(score)):
            raise ValueError(f"it must return finite floats, one is {score!r:.80}")
    return [float(score) for score in scores]


def _live_and_die_with_the_run() -> None:
    # The run is interrupted, not its workers. SIGTERM keeps its plain meaning: it kills also where Python is held up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(multiprocessing.parent_process())
    # A function may use JAX; the accelerator is the run's.
    os.environ["JAX_PLATFORMS"], os.environ["CUDA_VISIBLE_DEVICES"] = "cpu", ""
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    # What functions print would be written over the run's live view.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def _die_with(parent: BaseProcess | None) -> None:
    if parent is None:
        return
    if sys.platform == "linux":
        import fcntl

        # The system itself ends a process that holds Python up: the run's end closes this pipe, which nobody writes to,
        # and a signal about a pipe kills.
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    threading.Thread(target=_outlive_not, args=(parent,), daemon=True).start()


def _outlive_not(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    # As for a script: what lies beside the file can be imported.
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    takes = _takes(function)
    if takes is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in takes}


def _takes(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions do not say
        return None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_LENGTH]
