"""The blocks of code of a page, in the order and form that a reader copies them."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = sorted(path for name in OUTSIDE if (path := ROOT / name).is_file()) + sorted((ROOT / "docs").rglob("*.md"))
# On the line before a block of Python: it goes on where the block before it ended.
CONTINUES = "<!-- continues -->"


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
      place: page and line, for people.
      language: as the page names it; "" where it names none, and for blocks that are indented instead of fenced.
      code: its lines; of Python, with those it continues before them.
    """

    place: str
    language: str
    code: str


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The blocks of a page's text."""
    lines = text.splitlines()
    number, python, said = 0, "", ""
    while number < len(lines):
        line, place = lines[number], f"{page}:{number + 1}"
        number += 1
        if line.startswith("```"):
            end = lines.index("```", number)
            language, code = line.removeprefix("```").strip(), "\n".join(lines[number:end]) + "\n"
            number = end + 1
            if language == "python":
                python = code = python + code if said == CONTINUES else code
            yield Block(place, language, code)
        elif re.match(r"( {4}|\t)\S", line) and not said:
            yield Block(place, "", line)
        said = line if line else ("" if said != CONTINUES else said)


def all_blocks() -> list[Block]:
    """Of all pages."""
    return [block for path in PAGES for block in blocks_of(path.read_text(), str(path.relative_to(ROOT)))]


def commands(code: str) -> Iterator[str]:
    """The commands of a shell's block, each whole, however many lines it takes."""
    unfinished = ""
    for line in code.splitlines():
        unfinished += line
        if unfinished.endswith("\\"):
            unfinished = unfinished[:-1]
        elif _has_open_quote(unfinished):
            unfinished += "\n"
        else:
            if shlex.split(unfinished, comments=True):
                yield unfinished.strip()
            unfinished = ""
    assert not unfinished, f"a command that does not end: {unfinished}"


def _has_open_quote(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False
