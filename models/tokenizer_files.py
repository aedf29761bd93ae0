"""The files of a tokenizer in the hub's layout, in and out.

tokenizer.json holds the backend; tokenizer_config.json (before 2024 also special_tokens_map.json) names its special
tokens; chat_template.jinja and additional_chat_templates hold the templates; generation_config.json the ids that end a
reply. Tokens that these files name and the vocabulary lacks are left out: no model has a row for them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from models.backends import add_around
from models.files import read_json_if_present

BACKEND, SETTINGS, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
TEMPLATE_NAME = re.compile(r"\w[\w.-]*")  # becomes a file's name


@dataclass(frozen=True)
class TokenizerFiles:
    """What a folder says of its tokenizer.

    Attributes:
      backend: of tokenizer.json, with the special tokens and the added BOS and EOS that the settings ask for.
      settings: tokenizer_config.json without its templates.
      generation: generation_config.json as read, {} where there is none.
      templates: jinja2 sources by name, mostly just "default".
    """

    backend: tokenizers.Tokenizer
    settings: Mapping[str, Any]
    generation: Mapping[str, Any]
    templates: Mapping[str, str]


def read_files(folder: Path) -> TokenizerFiles | None:
    """A folder's tokenizer files, or None where it has no tokenizer.json; a damaged one is a ValueError."""
    if not (folder / BACKEND).is_file():
        return None
    backend = _read_backend(folder / BACKEND)
    settings = read_json_if_present(folder / SETTINGS)
    if "added_tokens_decoder" not in settings:  # since it exists, the older file only repeats the newer one
        settings |= read_json_if_present(folder / SPECIAL_TOKENS)
    templates = _read_templates(folder, settings.pop("chat_template", None))
    _add_listed_tokens(backend, settings)
    if "add_bos_token" in settings or "add_eos_token" in settings:
        ends = {name: text for name, text in special_texts(settings).items() if backend.token_to_id(text) is not None}
        bos, eos = (ends.get(f"{end}_token") if settings.get(f"add_{end}_token") else None for end in ("bos", "eos"))
        add_around(backend, bos, eos)
    return TokenizerFiles(backend, settings, read_json_if_present(folder / GENERATION), templates)


def write_files(folder: Path, files: TokenizerFiles) -> None:
    """Write what `read_files` reads, and make the folder if need be; a template with no fit name is a ValueError."""
    wrong = [name for name in files.templates if not TEMPLATE_NAME.fullmatch(name)]
    if wrong:
        raise ValueError(f"chat template {wrong[0]!r} cannot be a file's name")
    folder.mkdir(parents=True, exist_ok=True)
    files.backend.save(str(folder / BACKEND))
    _write_json(folder / SETTINGS, files.settings)
    if files.generation:
        _write_json(folder / GENERATION, files.generation)
    (folder / TEMPLATE).unlink(missing_ok=True)
    for name, template in files.templates.items():
        path = folder / TEMPLATE if name == "default" else folder / MORE_TEMPLATES / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8", newline="")  # no newline of a template may change


def special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that settings name: {"bos_token": "<s>", ...}."""
    texts = {name: _text(entry) for name, entry in settings.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def id_list(entry: int | list[int] | None) -> list[int]:
    """The ids of an entry which may be one id, a list of them, or missing."""
    return list(entry) if isinstance(entry, list) else [] if entry is None else [entry]


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer file: {error}") from None
    # Left over from the training of another model; either would silently change what texts encode to.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_templates(folder: Path, listed: str | list[Mapping[str, str]] | None) -> dict[str, str]:
    templates = {"default": listed} if isinstance(listed, str) else {}
    if isinstance(listed, list):
        templates = {entry["name"]: entry["template"] for entry in listed}
    paths = {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE).is_file():
        paths["default"] = folder / TEMPLATE
    return templates | {name: path.read_bytes().decode() for name, path in paths.items()}


def _add_listed_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    # The settings may say that plain tokens of the vocabulary are special.
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = {entry["content"]: AddedToken(**entry) for entry in settings.get("added_tokens_decoder", {}).values()}
    more = [_text(entry) for entry in settings.get("additional_special_tokens") or ()]
    for text in [*special_texts(settings).values(), *more]:
        listed.setdefault(text, AddedToken(text, special=True, normalized=False))
    for text, token in listed.items():
        if text not in known and backend.token_to_id(text) is not None:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _text(entry: Any) -> Any:
    return entry.get("content") if isinstance(entry, Mapping) else entry


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
