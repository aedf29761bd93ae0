"""Read and write the small files around a model, with one clear line when they are damaged."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds.

    Raises:
      FileNotFoundError: the file is not there.
      ValueError: it holds no JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As read_json, but an empty object where there is no file."""
    return read_json(path) if path.is_file() else {}


def write_whole(path: Path, text: str) -> None:
    """Writes a file that, whenever the process dies, holds all of the text or what it held before."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
