"""`jaxmask` and `python -m jaxmask`: what the library does from a shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxmask.audit import command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; ends the process with 2 where it is not known.

    Args:
      arguments: of the command line; those of the process by default.
    """
    parser = argparse.ArgumentParser(
        prog="jaxmask", description="Rollouts for reinforcement learning, and their supports."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "whether rollouts are fit to train on, and what truncation did to them"
    command.add_arguments(commands.add_parser("audit", help=text, description=f"Says {text}."))
    return command.run(parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
