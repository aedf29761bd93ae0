"""The command line: a preset and overrides of its fields, or a run to resume."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from train import run
from train.config import RunConfig
from train.presets import PRESETS, find_preset

DEFAULT_PRESET = "sort-tiny"
DESCRIPTION = f"""GRPO on recorded supports. --preset NAME is one of {", ".join(PRESETS)} (default {DEFAULT_PRESET});
the options below change its fields. --out FOLDER takes the run (default: a new folder under {run.RUNS}).
--resume RUN [--iterations N] continues a run from its last checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Runs `python -m train ARGV`; returns its exit code: 0 done, 2 cannot be done as asked, 130 interrupted."""
    try:
        _run(list(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"interrupted{stop}", file=sys.stderr)
        return 130
    return 0


def _run(argv: list[str]) -> None:
    console = Console()
    try:
        where, overrides = _parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if where.resume is not None:
        if where.preset is not None or where.out is not None:
            raise ValueError("--resume continues a run as it is: --preset and --out do not go with it.")
        run.resume(Path(where.resume), _iterations_only(overrides), console)
        return
    preset = find_preset(where.preset or DEFAULT_PRESET)
    config = _overridden(preset, overrides)
    run.start(config, None if where.out is None else Path(where.out), console)


def _overridden(preset: RunConfig, overrides: list[str]) -> RunConfig:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                tyro.conf.OmitArgPrefixes[RunConfig],
                prog=f"python -m train --preset {preset.preset}",
                description=DESCRIPTION,
                default=preset,
                args=overrides,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        # The group that tyro was parsing says nothing to whoever typed the option.
        raise ValueError(re.sub(r"^Error parsing (RunConfig|grpo): ", "", _first_paragraph(said.getvalue()))) from None


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
    parser = argparse.ArgumentParser(prog="python -m train", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--preset", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--out")
    parser.add_argument("--resume")
    return parser


def _iterations_only(overrides: list[str]) -> int | None:
    parser = argparse.ArgumentParser(prog="python -m train --resume RUN", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--iterations", type=int)
    try:
        known, unknown = parser.parse_known_args(overrides)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown:
        raise ValueError(f"--resume takes --iterations only: the run keeps its other settings; got {' '.join(unknown)}")
    return known.iterations
