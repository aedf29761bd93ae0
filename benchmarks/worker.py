"""A rival in an environment of its own: a process that stays alive and runs when it is told to, so that runs alternate.

One line of JSON asks, one line answers; the process that waits takes no processor time. Only this folder and the
standard library are needed on the other side, beside what the rival imports.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from generate_case import Case

SECONDS_TO_END = 10


class Worker:
    """A `Rival` (see `generate_case`) of another interpreter, with the same methods."""

    def __init__(self, python: str, module: str, folder: str, max_length: int, **options: Any):
        """Starts it and waits until it is built; RuntimeError with the end of its log where that fails."""
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115, closed with the worker
        self.process = subprocess.Popen(
            [python, str(Path(__file__)), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.call("__init__", folder, max_length, **options)

    def run(self, case: Case) -> dict[str, list]:
        return self.call("run", case.to_plain())

    def token_logprobs(self, token_ids: list[int]) -> list[float]:
        return self.call("token_logprobs", token_ids)

    def close(self) -> None:
        """Ends the process: it sees the end of its input; one whose threads wait for work does not end by itself."""
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What any method of the `Rival` returns; arguments and answer must survive JSON."""
        try:
            self.process.stdin.write(json.dumps([method, arguments, options]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            end = Path(self.log.name).read_text()[-2000:]
            self.close()
            raise RuntimeError(f"{self.process.args} ended:\n{end}")
        return json.loads(answer)


def main() -> None:
    # Libraries print; what they print must not reach the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rival = importlib.import_module(sys.argv[1])
    target = None
    for line in sys.stdin:
        method, arguments, options = json.loads(line)
        if method == "__init__":
            target, found = rival.Rival(*arguments, **options), None
        elif method == "run":
            found = target.run(Case.from_plain(*arguments))
        else:
            found = getattr(target, method)(*arguments)
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
