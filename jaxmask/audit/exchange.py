"""Where a value stands in a file, and what was asked for beside what was answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

GOOD_STATUS = 200


@dataclasses.dataclass(frozen=True)
class Where:
    """A place in a file.

    Attributes:
      file: its name.
      line: from 1; 0 where the file has none.
      item: of a list that stands in the line, or of the file, from 0; None where there is no list.
    """

    file: str
    line: int
    item: int | None = None

    def name(self, choice: Any = None) -> str:
        """The name of a row; `choice` where a request has several."""
        line = f":{self.line}" if self.line else ""
        item = "" if self.item is None else f", {'item' if self.line else 'row'} {self.item}"
        own = "" if choice is None else f", {'choice' if self.line else 'row'} {choice}"
        return f"{self.file}{line}{item}{own}"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An answer, and the request it was given to where the file has it.

    Attributes:
      where: it stands.
      request: what was asked for; None where it is not known.
      answer: what came back: an object, or the list of events of a stream.
      is_refused: whether nothing was sampled, for what the status or an error object says.
    """

    where: Where
    request: Mapping[str, Any] | None
    answer: Any
    is_refused: bool


def exchanges(value: Any, where: Where) -> Iterator[Exchange]:
    """The answers of one line: a list holds several, unless it is no list of objects."""
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        for item, one in enumerate(value):
            yield _exchange(one, dataclasses.replace(where, item=item))
    else:
        yield _exchange(value, where)


def _exchange(value: Any, where: Where) -> Exchange:
    if not isinstance(value, dict):
        return Exchange(where, None, value, is_refused=False)
    beside = next((name for name in ("response", "stream") if isinstance(value.get(name), (dict, list))), None)
    # Miles' samples hold their text as `response`.
    if beside is None:
        is_refused = "error" in value or value.get("status", GOOD_STATUS) != GOOD_STATUS
        return Exchange(where, None, value, is_refused and "choices" not in value and "tokens" not in value)
    request, answer = value.get("request"), value[beside]
    is_refused = value.get("status", GOOD_STATUS) != GOOD_STATUS
    return Exchange(where, request if isinstance(request, dict) else None, answer, is_refused)
