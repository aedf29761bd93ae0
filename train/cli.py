"""The command line: a preset, a YAML file and overrides of their fields, or a run to resume or to draw."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
import yaml
from rich.console import Console

from train import finishing, run
from train.presets import PRESETS, find_preset
from train.processes import Cluster, is_first, join
from train.run_config import RunConfig, with_values

DEFAULT_PRESET = "sort-tiny"
DESCRIPTION = f"""GRPO on recorded supports. --preset NAME is one of
{", ".join(PRESETS)} (default {DEFAULT_PRESET});
--config FILE.yaml changes fields of it, and the options below change them last. --print-config prints the outcome, as
such a file, and ends. --out FOLDER takes the run (default: a new folder under {run.RUNS}). --resume RUN continues a run
from its last checkpoint, with --iterations N or --mesh ... where they change. --report RUN draws its curves and its
page anew, also while it goes on. A run of several processes starts each of them with --coordinator HOST:PORT
--num-processes N --process-id I, or with --distributed where JAX finds these out: Slurm, Open MPI, Kubernetes, TPUs."""


def main(argv: Sequence[str]) -> int:
    """Runs `python -m train ARGV`; returns its exit code: 0 done, 2 cannot be done as asked, 130 interrupted."""
    try:
        _run(list(argv))
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"interrupted{stop}", file=sys.stderr)
        return 130
    return 0


def _run(argv: list[str]) -> None:
    try:
        where, overrides = _parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    console = Console(quiet=not _meet(where))
    alone = {"--resume": where.resume, "--report": where.report}
    for option, folder in alone.items():
        others = (where.preset, where.config, where.out, *(alone[name] for name in alone if name != option))
        if folder is not None and (any(other is not None for other in others) or where.print_config):
            raise ValueError(
                f"{option} takes a run as it is: no other run, --preset, --config, --print-config or --out."
            )
    if where.report is not None:
        if overrides:
            raise ValueError(f"--report takes nothing else; got {' '.join(overrides)}")
        finishing.draw(Path(where.report), console)
        return
    if where.resume is not None:
        iterations, mesh = _what_may_change(overrides)
        run.resume(Path(where.resume), iterations, console, mesh)
        return
    config = _overridden(_chosen(where.preset, where.config), overrides)
    if where.print_config:
        print(config.to_yaml(), end="")
        return
    run.start(config, None if where.out is None else Path(where.out), console)


def _chosen(preset: str | None, path: str | None) -> RunConfig:
    """The preset with what a YAML file changes; the file may name the preset itself."""
    if path is None:
        return find_preset(preset or DEFAULT_PRESET)
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _OnceLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of a run's fields, as --print-config prints it.")
    named = values.get("preset", preset)
    if preset is not None and named != preset:
        raise ValueError(f"{path} is of preset {named!r}, and --preset says {preset!r}.")
    base = find_preset(DEFAULT_PRESET if named is None else str(named))
    try:
        return with_values(base, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class _OnceLoader(yaml.SafeLoader):
    """Refuses keys that come twice: YAML would forget the first one, a whole section perhaps."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"key {name!r} comes twice")
        return super().construct_mapping(node, deep)


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
        raise ValueError(
            re.sub(
                r"^Error parsing (RunConfig|grpo|data|evaluation|saving|watch): ", "", _first_paragraph(said.getvalue())
            )
        ) from None


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
    parser.add_argument("--report")
    parser.add_argument("--config")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    return parser


def _meet(where: argparse.Namespace) -> bool:
    """Whether this process is the one that speaks, once it has met the others of its run, where there are some."""
    given = (where.coordinator, where.num_processes, where.process_id)
    is_one = given == (None, None, None)
    if where.distributed and not is_one:
        raise ValueError(
            "--distributed finds out --coordinator, --num-processes and --process-id; it takes none of them."
        )
    cluster = Cluster(*given)
    if is_one and not where.distributed:
        return True
    if where.report is not None or where.print_config:
        raise ValueError("--report and --print-config take one process.")
    join(cluster)
    return is_first()


def _what_may_change(overrides: list[str]) -> tuple[int | None, str | None]:
    """Iterations and mesh of a run that is resumed, each None where it stays."""
    parser = argparse.ArgumentParser(prog="python -m train --resume RUN", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--mesh")
    try:
        known, unknown = parser.parse_known_args(overrides)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown:
        raise ValueError(
            f"--resume takes --iterations and --mesh only: the run keeps its other settings; got {' '.join(unknown)}"
        )
    return known.iterations, known.mesh
