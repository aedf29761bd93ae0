"""JSON lines of a file, compressed with gzip or not, each as a value or as the reason why it is none."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 1 << 28
# How a file begins that is one JSON text, written over several lines. It is read whole.
_TEXT_BEGINS = (b"[", b"{", b"[{")
_GZIP = b"\x1f\x8b"
_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
      number: from 1.
      value: what its JSON says; of a key that stands twice the last value. None where `error` says something.
      error: why it is no JSON; empty where it is.
      num_bytes: how long it is, uncompressed.
      is_blank: whether it holds nothing.
    """

    number: int
    value: Any
    error: str
    num_bytes: int
    is_blank: bool = False


def lines(path: Path) -> Iterator[Line]:
    """The lines of a file; one that ends in the middle of its compression ends with a line that says so.

    A file whose first line is not whole, but which is one JSON text, counts as one line.
    """
    with _opened(path) as file:
        number = 0
        try:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                line = _line(number, raw, file)
                if raw.strip() in _TEXT_BEGINS and number == 1 and (whole := _text(path)) is not None:
                    yield whole
                    return
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            yield Line(number + 1, None, f"the file is compressed, and broken from here on: {error}", 0)


def _opened(path: Path) -> io.BufferedIOBase:
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP
    return gzip.GzipFile(path) if is_gzip else path.open("rb")


def _line(number: int, raw: bytes, file: io.BufferedIOBase) -> Line:
    num_bytes = len(raw)
    if num_bytes > MAX_LINE_BYTES:
        while not raw.endswith(b"\n") and (raw := file.readline(MAX_LINE_BYTES)):
            num_bytes += len(raw)
        return Line(number, None, f"{num_bytes} bytes are more than a line of {MAX_LINE_BYTES}", num_bytes)
    raw = raw.removeprefix(_MARK) if number == 1 else raw
    if not raw.strip():
        return Line(number, None, "", num_bytes, is_blank=True)
    value, error = _value(raw)
    if error and not raw.endswith(b"\n"):
        error = f"the last line is not whole: {error}"
    return Line(number, value, error, num_bytes)


def _value(raw: bytes) -> tuple[Any, str]:
    try:
        return json.loads(raw.decode()), ""
    # Also for bytes that are no UTF-8, and for integers of more digits than Python reads.
    except ValueError as error:
        return None, str(error)
    except RecursionError:
        return None, "lists and objects stand in each other too deep"


def _text(path: Path) -> Line | None:
    with _opened(path) as file:
        try:
            raw = file.read(MAX_LINE_BYTES + 1).removeprefix(_MARK)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return None
    if len(raw) > MAX_LINE_BYTES:
        return None
    value, error = _value(raw)
    return None if error else Line(1, value, "", len(raw))
