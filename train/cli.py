"""The command line: a preset and overrides of its fields, or a run to resume."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from train import run
from train.config import RunConfig
from train.presets import PRESETS, find_preset

DEFAULT_PRESET = "sort-tiny"
RUNS = Path("runs")


def main(argv: Sequence[str]) -> int:
    """Runs `python -m train ARGV`; returns its exit code: 0 done, 2 cannot be done as asked, 130 interrupted."""
    try:
        _run(list(argv))
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _run(argv: list[str]) -> None:
    console = Console()
    where, overrides = _parser().parse_known_args(argv)
    if where.resume is not None:
        if where.preset is not None or where.out is not None:
            raise ValueError("--resume continues a run as it is: --preset and --out do not go with it.")
        run.resume(Path(where.resume), _iterations_only(overrides), console)
        return
    preset = find_preset(where.preset or DEFAULT_PRESET)
    config = _overridden(preset, overrides)
    folder = Path(where.out) if where.out is not None else run.new_folder(RUNS, preset.preset)
    run.start(config, folder, console)


def _overridden(preset: RunConfig, overrides: list[str]) -> RunConfig:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                tyro.conf.OmitArgPrefixes[RunConfig],
                prog=f"python -m train --preset {preset.preset}",
                description="Fields of the preset, and how to change them.",
                default=preset,
                args=overrides,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_first_paragraph(said.getvalue())) from None


def _first_paragraph(box: str) -> str:
    """The message inside tyro's drawn box, on one line: what stands between the title and the next rule.

    The box is drawn in Unicode or, where the screen has none, in ASCII, with a rule under the title.
    """
    cleaned = [line.strip(" \u2502\u256d\u256e\u2570\u256f\u2500") for line in box.splitlines()]
    lines = ["" if set(line) <= {"-"} else line for line in cleaned]
    paragraphs = [list(group) for is_text, group in itertools.groupby(lines, bool) if is_text]
    # In Unicode the title stands right above the message, in ASCII a rule lies between them.
    first = paragraphs[0][1:] or paragraphs[1]
    return " ".join(first)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m train", add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--out")
    parser.add_argument("--resume")
    return parser


def _iterations_only(overrides: list[str]) -> int | None:
    parser = argparse.ArgumentParser(prog="python -m train --resume RUN", allow_abbrev=False)
    parser.add_argument("--iterations", type=int)
    return parser.parse_args(overrides).iterations
