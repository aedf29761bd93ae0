"""What an audit came to, as plain data; reports are made of it."""

from __future__ import annotations

import dataclasses

from jaxmask.audit.finding import Finding, Severity
from jaxmask.audit.statistics import Statistics


@dataclasses.dataclass(frozen=True)
class Source:
    """Where rollouts came from.

    Attributes:
      name: of the file, as it was given.
      form: one of the forms that are read.
      num_rows: completions in it.
      num_skipped: answers in it that are refusals, and so no rollouts.
    """

    name: str
    form: str
    num_rows: int
    num_skipped: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything that was found.

    Attributes:
      sources: what was read, in order.
      findings: one of each kind of fault that was seen, errors before warnings, the most telling first.
      statistics: what truncation did.
      vocab_size: number of ids, V, that ids were checked against; None: it is not known, and ids were only checked to
        be 0 or more.
      num_rows_at_fault: rows with an error.
      is_strict: whether warnings make rollouts unfit, too.
    """

    sources: tuple[Source, ...]
    findings: tuple[Finding, ...]
    statistics: Statistics
    vocab_size: int | None
    num_rows_at_fault: int
    is_strict: bool = False

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make rollouts unfit."""
        return tuple(one for one in self.findings if one.severity is Severity.ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The other findings."""
        return tuple(one for one in self.findings if one.severity is Severity.WARNING)

    @property
    def is_fit(self) -> bool:
        """Whether the rollouts are fit to train on."""
        return not (self.errors or (self.is_strict and self.warnings))

    @property
    def verdict(self) -> str:
        """In one line, whether they are, and what is in the way."""
        warnings = count(len(self.warnings), "kind") + " of warning"
        if self.is_fit:
            return "fit to train on" + (f", with {warnings}" if self.warnings else "")
        num_rows = count(self.num_rows_at_fault, "row")
        faults = f"{count(len(self.errors), 'kind')} of fault in {num_rows} of {self.statistics.num_rows:,}"
        if not self.errors:
            return f"NOT fit to train on: {warnings}, and --strict"
        return f"NOT fit to train on: {faults}"


def how_often(finding: Finding) -> str:
    """How often a fault was seen: "12 places in 3 rows", or "3 rows" where it is a matter of whole rows."""
    rows = count(finding.num_rows, "row")
    is_of_rows = finding.count == finding.num_rows and all(place.position < 0 for place in finding.worst)
    return rows if is_of_rows else f"{count(finding.count, 'place')} in {rows}"


def count(number: int, what: str) -> str:
    """A number of things: "1 row", "1,200 rows"."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")
