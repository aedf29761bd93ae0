"""The command line of `python -m serve`."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import tyro

from serve import generate_command, server_command

USAGE = """usage: python -m serve MODEL [options]
       python -m serve generate MODEL PROMPT [PROMPT ...] [options]

The first serves a model over HTTP, the second completes prompts offline; both tell how many ids each token was drawn
from. python -m serve MODEL --help and python -m serve generate --help list the options."""
Options = TypeVar("Options")

INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Runs `python -m serve ARGV`; returns its exit code.

    0 done, 1 failed on the way, 2 cannot be done as asked, 130 interrupted.
    """
    # A screen that lacks a character gets "?" instead of an error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _run(list(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has gone. The interpreter flushes once more, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ImportError) as error:
        return _refuse(error, 2)
    except (RuntimeError, MemoryError) as error:
        return _refuse(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if argv[:1] == ["generate"]:
        generate_options = _parsed(generate_command.GenerateOptions, "python -m serve generate", argv[1:])
        with _uninterrupted():
            importlib.import_module("jaxmask")
        return generate_command.run(generate_options)
    server_options = _parsed(server_command.ServerOptions, "python -m serve", argv)
    with _uninterrupted():
        importlib.import_module("jaxmask")
    return server_command.run(server_options)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end: interrupted while it loads, JAX's extension prints a traceback of its own."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _parsed(kind: type[Options], prog: str, argv: list[str]) -> Options:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=prog, args=argv)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_complaint(said.getvalue())) from None


def _complaint(box: str) -> str:
    """What tyro says in its drawn box, on one line: the text between the title and the next rule."""
    lines = [line.strip(" |+\u2502\u256d\u256e\u2570\u256f\u2500") for line in box.splitlines()]
    texts = ["" if set(line) <= {"-"} else line for line in lines]
    paragraphs = [list(group) for is_text, group in itertools.groupby(texts, bool) if is_text]
    # Drawn in ASCII, the title is a paragraph of its own.
    return " ".join(paragraphs[0][1:] or paragraphs[1])


def _refuse(error: BaseException, code: int) -> int:
    print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return code
