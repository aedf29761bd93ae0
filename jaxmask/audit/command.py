"""`jaxmask audit FILE...`: the command around `audit`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from jaxmask.audit.auditing import NUM_SHOWN, TOLERANCE, Audit, audit
from jaxmask.audit.files import AUTO, FORMS, UnreadableError
from jaxmask.audit.report_text import printable

FIT, NOT_FIT, UNREADABLE = 0, 1, 2
# What shells give for a program that Ctrl-C ended.
INTERRUPTED = 130
STDIN = "-"
_ENDING = """exit code: 0 fit to train on, 1 not fit, 2 a wrong option or a file that cannot be read.
--vocab-size and --eos-token-id are those of the model; without them, ids and ends of completions are checked less."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ENDING
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON lines (gzip or not) or npz; - is the input")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", metavar="PAGE", help="write the report as a page with pictures, too")
    parser.add_argument("--form", choices=(AUTO, *FORMS), default=AUTO, help="of the files; found out by default")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="ids of the model; by default what the files say")
    parser.add_argument(
        "--eos-token-id",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="that ends a completion; once for each where there are several",
    )
    parser.add_argument(
        "--show", type=int, default=NUM_SHOWN, metavar="N", help="places of each fault; default %(default)s"
    )
    parser.add_argument("--strict", action="store_true", help="warnings make rollouts unfit, too")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, metavar="X", help="of log-probabilities; default %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Audits, reports, and returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = _audit(options, Path(folder))
            if options.html is not None:
                # Half of a surrogate pair cannot be written.
                Path(options.html).write_text(result.to_html(), encoding="utf-8", errors="replace")
            if options.json:
                _print(json.dumps(result.to_dict(), allow_nan=False, indent=2) + "\n")
            else:
                _print(result.to_text(is_coloured=_is_coloured()))
        except (UnreadableError, OSError, ValueError) as error:
            # Names of files and arrays stand in it.
            print(f"jaxmask audit: {printable(str(error))}", file=sys.stderr)
            return UNREADABLE
        except KeyboardInterrupt:
            print("jaxmask audit: interrupted.", file=sys.stderr)
            return INTERRUPTED
    return FIT if result.is_fit else NOT_FIT


def _audit(options: argparse.Namespace, folder: Path) -> Audit:
    result = audit(
        [_path(name, folder) for name in options.files],
        form=options.form,
        vocab_size=options.vocab_size,
        eos_token_ids=options.eos_token_id,
        num_shown=options.show,
        is_strict=options.strict,
        tolerance=options.tolerance,
    )
    # Under the names that were given, and not those of copies.
    named = zip(options.files, result.sources, strict=True)
    return dataclasses.replace(result, sources=tuple(dataclasses.replace(one, name=name) for name, one in named))


def _path(name: str, folder: Path) -> Path:
    """The file of a name; the input and other pipes as a copy, as a file is looked at twice and a pipe is read once."""
    path = Path(name)
    if name != STDIN and (not path.exists() or path.is_file() or path.is_dir()):
        return path
    own = folder / name.replace("/", "_") / ("stdin" if name == STDIN else path.name)
    if not own.exists():
        own.parent.mkdir()
        with own.open("wb") as file, _opened(name) as given:
            shutil.copyfileobj(given, file)
    return own


def _opened(name: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if name != STDIN:
        return Path(name).open("rb")
    if sys.stdin is None:
        raise UnreadableError("the input is closed.")
    return contextlib.nullcontext(sys.stdin.buffer)


def _is_coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _print(text: str) -> None:
    try:
        sys.stdout.write(text.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8"))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough. Python would complain again when it closes the output.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
