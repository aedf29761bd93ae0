"""The changelog's section of a version, where a tag is to become a release.

    python tests/release_notes.py v0.1.0

Ends with a line that says what does not agree: the tag, the version of the package, the changelog. Needs nothing but
Python.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """Of the package, read without importing it."""
    text = (ROOT / "jaxmask" / "__init__.py").read_text()
    return re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)[1]


def notes(tag: str, changelog: str) -> str:
    """The section of the version a tag names.

    Raises:
      ValueError: tag, version and changelog do not agree.
    """
    if tag != f"v{version()}":
        raise ValueError(f"tag must be v{version()}, the version of jaxmask/__init__.py, got {tag}")
    sections = re.split(r"^## (?=\[)", changelog, flags=re.MULTILINE)[1:]
    heading = re.compile(rf"\[{re.escape(version())}\] - \d{{4}}-\d\d-\d\d\n")
    found = [section for section in sections if heading.match(section)]
    if len(found) != 1:
        raise ValueError(f"CHANGELOG.md must have one dated section [{version()}], has {len(found)}")
    # Links of headings stand behind the last section.
    body = re.split(r"^\[[^\]]+\]: ", heading.sub("", found[0], count=1), maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not body:
        raise ValueError(f"the section [{version()}] of CHANGELOG.md is empty")
    return body + "\n"


if __name__ == "__main__":
    try:
        print(notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text()), end="")
    except ValueError as error:
        sys.exit(f"error: {error}")
