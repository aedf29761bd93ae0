"""Runs the notebooks: each in a kernel and a folder of its own, with its outputs written back.

python demos/execute.py                      # all of them, in place
python demos/execute.py demos/01_*.ipynb
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

DEMOS = Path(__file__).resolve().parent
ROOT = DEMOS.parent
TIMEOUT = 600  # seconds of one cell

# Of a cell that ran: when, and of a kernel: which Python. They change at each run and say nothing to a reader.
_CELL_METADATA = ("execution", "ExecuteTime")
_LANGUAGE = {"name": "python"}


def notebooks() -> list[Path]:
    """The notebooks of this folder, in order."""
    return sorted(DEMOS.glob("*.ipynb"))


def run(path: Path, environment: Mapping[str, str] | None = None) -> NotebookNode:
    """The notebook with the outputs of a fresh kernel, which imports this checkout.

    Args:
      path: of the notebook; it is not written to.
      environment: variables of the kernel; None: those of this process.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
      nbclient.exceptions.CellTimeoutError: a cell took longer than `TIMEOUT` seconds.
    """
    return run_cells(nbformat.read(path, as_version=4), environment)


def run_cells(notebook: NotebookNode, environment: Mapping[str, str] | None = None) -> NotebookNode:
    """As `run`, of a notebook in memory, which is changed."""
    variables = dict(os.environ if environment is None else environment)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH", "")]))
    # Its working folder, so that what a notebook writes is gone afterwards.
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env=variables)
    return normalised(notebook)


def normalised(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what changes at every run: times, versions, random ids, carriage returns of live lines."""
    notebook.metadata["language_info"] = dict(_LANGUAGE)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
        for name in _CELL_METADATA:
            cell.metadata.pop(name, None)
        for output in cell.get("outputs", []):
            _normalise_output(output)
    return notebook


def text_of(notebook: NotebookNode) -> str:
    """All that the outputs say in words, one after another."""
    parts: list[str] = []
    for output in _outputs(notebook):
        parts.append(output.get("text", ""))
        parts += [data for kind, data in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


def num_pictures(notebook: NotebookNode) -> int:
    """PNG pictures among the outputs."""
    return sum("image/png" in output.get("data", {}) for output in _outputs(notebook))


def _outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def _normalise_output(output: dict[str, Any]) -> None:
    output.get("transient", {}).clear()
    data = output.get("data", {})
    if "image/png" in data:
        # What a figure is called in words, its size included.
        data["text/plain"] = "<Figure>"
    if "text" in output:
        output["text"] = re.sub(r"[^\n]*\r(?!\n)", "", output["text"])


def main(arguments: Sequence[str]) -> None:
    """Runs the named notebooks, or all, and writes them back."""
    for path in [Path(argument) for argument in arguments] or notebooks():
        started = time.perf_counter()
        nbformat.write(run(path), path)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
