"""Rollouts of a file, in any form that is known, block by block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxmask.audit import archives
from jaxmask.audit.builder import RowsBuilder
from jaxmask.audit.completion import Completion
from jaxmask.audit.exchange import Exchange, Where, exchanges
from jaxmask.audit.lines import lines
from jaxmask.audit.readers import answer, miles, prime_rl, rollouts, samples, sglang, vllm
from jaxmask.audit.rows import Rows
from jaxmask.audit.values import WHOLE_ROW, Problem, shown

AUTO = "auto"
# Lines that are looked at before it is said that a file holds nothing known.
_MAX_LOOKED_AT = 1000


class UnreadableError(ValueError):
    """A file that holds no rollouts in any form that is known."""


@dataclasses.dataclass(frozen=True)
class _Form:
    knows: Callable[[Any], bool]
    completions: Callable[[Exchange], Iterator[Completion]]


# In the order in which they are tried: a more particular look before a more general one.
_OF_RECORDS = {
    "sglang": _Form(sglang.knows, sglang.completions),
    "vllm": _Form(vllm.knows, vllm.completions),
    "miles": _Form(miles.knows, miles.completions),
    "prime-rl": _Form(prime_rl.knows, prime_rl.completions),
    "samples": _Form(samples.knows, samples.completions),
}
# What is an archive as a whole.
_OF_ARCHIVES = {
    "rollout": _Form(rollouts.knows, rollouts.completions),
    "answer": _Form(answer.knows, answer.completions),
}
FORMS: tuple[str, ...] = (*_OF_RECORDS, *_OF_ARCHIVES)


class Reading(Iterator[Rows]):
    """The blocks of a file, once, and what was met on the way.

    Attributes:
      form: one of FORMS.
      num_rows: completions so far.
      num_skipped: answers so far that are refusals: a status other than 200, or an error object.
      num_blank: empty lines so far.
      num_bytes: bytes so far, uncompressed.
    """

    def __init__(self, path: Path, form: str):
        """Of a file in a form."""
        self.form = form
        self.num_rows = self.num_skipped = self.num_blank = self.num_bytes = 0
        self._blocks = self._all(path)

    def __next__(self) -> Rows:
        """The next block.

        Raises:
          UnreadableError: the file has ended and nothing in it was of the form.
        """
        return next(self._blocks)

    def _all(self, path: Path) -> Iterator[Rows]:
        builder = RowsBuilder()
        for completion, num_bytes in self._of_archive(path) if archives.is_archive(path) else self._of_lines(path):
            builder.add(completion, num_bytes)
            if builder.is_full:
                yield builder.build()
        if not self.num_rows:
            raise UnreadableError(
                f"{path}: no completion in the form {self.form} is in it; {self.num_skipped} answers were refusals."
            )
        if not builder.is_empty:
            yield builder.build()

    def _of_lines(self, path: Path) -> Iterator[tuple[Completion, int]]:
        for line in lines(path):
            self.num_bytes += line.num_bytes
            self.num_blank += line.is_blank
            where, num_bytes = Where(path.name, line.number), line.num_bytes
            if line.error:
                yield _unread(where, line.error), num_bytes
            elif not line.is_blank:
                for completion in self._completions(line.value, where):
                    yield completion, num_bytes
                    num_bytes = 0

    def _of_archive(self, path: Path) -> Iterator[tuple[Completion, int]]:
        self.num_bytes = num_bytes = path.stat().st_size
        named = _arrays(path)
        parts = [named] if self.form in _OF_ARCHIVES else archives.records(named)
        for item, part in enumerate(parts):
            where = Where(path.name, 0, item if len(parts) > 1 else None)
            for completion in self._completions(part, where):
                yield completion, num_bytes
                num_bytes = 0

    def _completions(self, value: Any, where: Where) -> Iterator[Completion]:
        form = {**_OF_RECORDS, **_OF_ARCHIVES}[self.form]
        for exchange in exchanges(value, where):
            if exchange.is_refused:
                self.num_skipped += 1
            elif not form.knows(exchange.answer):
                yield _unread(exchange.where, f"{shown(exchange.answer)} is nothing of the form {self.form}")
            else:
                for completion in form.completions(exchange):
                    self.num_rows += 1
                    yield completion


def read(path: Path, *, form: str = AUTO) -> Reading:
    """The rollouts of a file, as an iterator over blocks of rows; a block holds some 65,000 tokens.

    Args:
      path: JSON lines, compressed with gzip or not; or a NumPy archive.
      form: one of FORMS; "auto" finds it out.

    Raises:
      UnreadableError: the file holds nothing that is known, or is not there; also by the iterator, where it ends
        without a completion.
      ValueError: a form that is not known.
    """
    if form not in (AUTO, *FORMS):
        raise ValueError(f"form must be one of {', '.join((AUTO, *FORMS))}, got {form!r}.")
    if path.exists() and not path.is_file():
        raise UnreadableError(f"{path}: it is no regular file, and files are opened more than once.")
    return Reading(path, detect(path) if form == AUTO else form)


def detect(path: Path) -> str:
    """The form of a file's rollouts, one of FORMS; raises UnreadableError where it is none."""
    try:
        found, seen = _of_archive(path) if archives.is_archive(path) else _of_lines(path)
    except OSError as error:
        raise UnreadableError(f"{path}: it cannot be read: {error}.") from error
    if found is None:
        raise UnreadableError(
            f"{path}: no rollouts in a form that is known ({', '.join(FORMS)}); it begins with {seen or 'nothing'}."
        )
    return found


def _of_lines(path: Path) -> tuple[str | None, str]:
    """The form, and what stands first in the file."""
    seen = ""
    for line in lines(path):
        if line.number > _MAX_LOOKED_AT:
            break
        if line.is_blank:
            continue
        seen = seen or line.error or shown(line.value)
        for exchange in () if line.error else exchanges(line.value, Where(path.name, line.number)):
            for name, form in _OF_RECORDS.items():
                if form.knows(exchange.answer):
                    return name, seen
    return None, seen


def _of_archive(path: Path) -> tuple[str | None, str]:
    named = _arrays(path)
    looks = [(named, _OF_ARCHIVES), *((record, _OF_RECORDS) for record in archives.records(named))]
    for part, forms in looks:
        for name, form in forms.items():
            if form.knows(part):
                return name, ""
    return None, f"the arrays {', '.join(list(named)[:8])}"


def _arrays(path: Path) -> dict[str, Any]:
    try:
        return archives.arrays(path)
    except ValueError as error:
        raise UnreadableError(f"{path}: the archive cannot be read: {error}.") from error


def _unread(where: Where, text: str) -> Completion:
    # Of no tokens and none of their supports: that it cannot be read is all that is wrong with it.
    return Completion(where.name(), [], [], [], problems=(Problem(WHOLE_ROW, "line", text),))
