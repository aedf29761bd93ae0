"""Text to token ids and back, and chat messages to prompt text."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, pre_tokenizers

from models.files import read_json_if_present


class Tokenizer:
    """One model's tokenizer.

    Attributes:
      eos_token_ids: ids that end a reply; may be empty.
      pad_token_id: id that fills unused cells, or None where the model names none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        pad_token_id: int | None = None,
        chat_template: str | None = None,
        template_values: Mapping[str, Any] | None = None,
    ):
        """Wrap a `tokenizers` backend; template_values are further names the chat template may use (bos_token)."""
        self._backend = backend
        self._chat_template = chat_template
        self._template_values = dict(template_values or {})
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a hub folder, or None where it has no tokenizer.json.

        Raises:
          ValueError: one of its files is damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        backend = _read_backend(path)
        settings = read_json_if_present(folder / "tokenizer_config.json")
        generation = read_json_if_present(folder / "generation_config.json")
        special = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        eos_token_ids = _eos_token_ids(backend, generation, special["eos_token"])
        pad_token_id = _id_of(backend, special["pad_token"])
        return cls(
            backend,
            eos_token_ids=eos_token_ids,
            pad_token_id=generation.get("pad_token_id") if pad_token_id is None else pad_token_id,
            chat_template=_read_chat_template(folder, settings),
            template_values={name: text for name, text in special.items() if text is not None},
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included; the model's may be larger through padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens written out in it become their single ids."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode([int(token_id) for token_id in token_ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **values: Any
    ) -> str:
        """The prompt text of a conversation.

        Args:
          messages: mappings with "role" and "content".
          add_generation_prompt: end with the opening of the assistant's reply.
          values: further names of the template ("enable_thinking", "tools").
        Raises:
          ValueError: the model has no chat template, or its template refuses the messages.
        """
        if self._chat_template is None:
            raise ValueError("this model has no chat template; pass the prompt as plain text")
        names = {"tools": None, "documents": None, **self._template_values, **values}
        try:
            template = _environment().from_string(self._chat_template)
            return template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **names)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None


def byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], special_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """A GPT-2 style backend in which each digit stands alone, from GGUF's lists ("a b" merges to "ab")."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return backend


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer file: {error}") from None


def _read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _eos_token_ids(backend: tokenizers.Tokenizer, generation: Mapping[str, Any], eos_token: str | None) -> list[int]:
    # The generation settings list all ids that end a reply; the tokenizer's own token may be missing there.
    listed = generation.get("eos_token_id")
    ids = list(listed) if isinstance(listed, list) else [] if listed is None else [listed]
    own = _id_of(backend, eos_token)
    return ids if own is None or own in ids else [*ids, own]


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _token_text(entry: str | Mapping[str, Any] | None) -> str | None:
    return entry["content"] if isinstance(entry, Mapping) else entry


def _environment() -> ImmutableSandboxedEnvironment:
    # The settings hub templates are written for; the sandbox, because templates come with downloaded files.
    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
