"""Text to token ids and back, and chat messages to prompt text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from models.backends import byte_letters, byte_tokens
from models.chat_template import render
from models.files import read_json_if_present
from models.text_stream import TextStream
from models.tokenizer_files import TokenizerFiles, id_list, read_files, special_texts, write_files

# What a tokenizer that came from no folder says of itself: `transformers` needs a class, and must not tidy spaces.
PLAIN_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# Texts of more characters are encoded where other threads of Python run meanwhile; for shorter ones that costs more.
LONG = 2000


class Tokenizer:
    """One model's tokenizer.

    Attributes:
      bos_token_id: id that begins a text, or None where the model has none.
      eos_token_ids: ids that end a reply; may be empty.
      pad_token_id: id that fills unused cells, or None where the model names none.
      generation_defaults: the settings of generation_config.json as read ("temperature", "top_k"); {} where there are
        none.
      special_token_ids: ids that `decode` leaves out unless told otherwise.
      byte_tokens: the byte each id stands for in a vocabulary with byte fallback, else empty.
      foreign_ids: ids of special tokens that the model has no row for, set by `check_vocabulary`; `encode` refuses
        them.
    """

    byte_tokens: Mapping[int, int]

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        pad_token_id: int | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        template_values: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        generation_defaults: Mapping[str, Any] | None = None,
    ):
        """Wrap a `tokenizers` backend.

        Args:
          backend: text to ids and back.
          bos_token_id: as the attribute, like eos_token_ids and pad_token_id.
          chat_template: jinja2 source, or several by name: "default", and "tool_use" for prompts with tools.
          template_values: further names the chat template may use (bos_token).
          settings: what tokenizer_config.json should hold besides, where this tokenizer is saved.
          generation_defaults: as the attribute.
        """
        self._backend = backend
        templates = {"default": chat_template} if isinstance(chat_template, str) else chat_template
        self._chat_templates = dict(templates or {})
        self._template_values = dict(template_values or {})
        self._settings = dict(settings or {})
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.generation_defaults = dict(generation_defaults or {})
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._byte_letters = byte_letters(backend)
        self.byte_tokens = byte_tokens(backend)
        self.foreign_ids: frozenset[int] = frozenset()

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a hub folder, or None where it has no tokenizer.json.

        Raises:
          ValueError: one of its files is damaged.
        """
        files = read_files(folder)
        if files is None:
            return None
        texts = special_texts(files.settings)
        own = {name: files.backend.token_to_id(text) for name, text in texts.items()}
        # Models older than generation_config.json keep these ids in their configuration.
        generation = files.generation or read_json_if_present(folder / "config.json")
        pad_token_id = own.get("pad_token")
        return cls(
            files.backend,
            bos_token_id=own.get("bos_token"),
            eos_token_ids=_eos_token_ids(generation, own.get("eos_token")),
            pad_token_id=generation.get("pad_token_id") if pad_token_id is None else pad_token_id,
            chat_template=files.templates,
            template_values=texts,
            settings=files.settings,
            generation_defaults=files.generation,
        )

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder in the hub's layout, from which `from_folder` reads the same one.

        Raises:
          ValueError: a chat template has a name that cannot be a file's.
        """
        settings = self._settings or PLAIN_SETTINGS | self._named_tokens()
        files = TokenizerFiles(self._backend, settings, self._generation(), self._chat_templates)
        write_files(Path(folder), files)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included; the model's may be larger through padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens written out in it become their single ids.

        Args:
          text: any text of whole characters.
          add_special_tokens: put the model's BOS before it, where the model wants one; chat templates write their own.
        Raises:
          ValueError: the text holds half of a surrogate pair, or a special token of `foreign_ids`.
        """
        try:
            if len(text) > LONG:
                token_ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            else:
                token_ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise ValueError(f"text must be a string of whole characters, it is {text!r:.80}") from None
        foreign = self.foreign_ids.intersection(token_ids) if self.foreign_ids else ()
        for token_id in foreign:
            raise ValueError(f"the model has no row for token {self._backend.id_to_token(token_id)!r} ({token_id})")
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        return self._backend.decode([int(token_id) for token_id in token_ids], skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, also where that is a part of a character."""
        if token_id in self.byte_tokens:
            return bytes([self.byte_tokens[token_id]])
        if self._byte_letters and token_id not in self._added_ids:
            return bytes(self._byte_letters[letter] for letter in self._backend.id_to_token(token_id) or "")
        return self.decode([token_id], skip_special_tokens=False).encode()

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """An empty stream that decodes ids as they come."""
        return TextStream(self, skip_special_tokens)

    def is_shown(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` lets an id into the text."""
        is_skipped = skip_special_tokens and token_id in self.special_token_ids
        return not is_skipped and self._backend.id_to_token(token_id) is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **values: Any
    ) -> str:
        """The prompt text of a conversation, with the BOS where the model's template writes one.

        Args:
          messages: mappings with "role" and "content".
          add_generation_prompt: end with the opening of the assistant's reply.
          values: further names of the template ("enable_thinking", "tools").
        Raises:
          ValueError: the model has no chat template, its template is not valid, or refuses the messages.
        """
        name = "tool_use" if values.get("tools") and "tool_use" in self._chat_templates else "default"
        if name not in self._chat_templates:
            raise ValueError("this model has no chat template; pass the prompt as plain text")
        names = {"tools": None, "documents": None, **self._template_values, **values}
        return render(self._chat_templates[name], messages, names | {"add_generation_prompt": add_generation_prompt})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        """Token ids of a conversation: of what `apply_chat_template` gives, and so never with a second BOS."""
        return self.encode(self.apply_chat_template(messages, **values), add_special_tokens=False)

    def ids_from(self, first: int) -> list[int]:
        """The ids at or above one of them, ascending."""
        return sorted(token_id for token_id in self._backend.get_vocab().values() if token_id >= first)

    def _named_tokens(self) -> dict[str, str]:
        ids = {"bos": self.bos_token_id, "eos": next(iter(self.eos_token_ids), None), "pad": self.pad_token_id}
        texts = {f"{name}_token": self._backend.id_to_token(i) for name, i in ids.items() if i is not None}
        return special_texts(texts | self._template_values)

    def _generation(self) -> dict[str, Any]:
        # What was read stays as it was, except where it would no longer give these ids.
        content = dict(self.generation_defaults)
        is_new, ids, texts = not content, list(self.eos_token_ids), special_texts(self._settings)
        own_eos, own_pad = (self._backend.token_to_id(texts.get(name, "")) for name in ("eos_token", "pad_token"))
        if ids and (is_new or _eos_token_ids(content, own_eos) != ids):
            content["eos_token_id"] = ids[0] if len(ids) == 1 else ids
        pad = self.pad_token_id
        if pad is not None and (is_new or pad not in (content.get("pad_token_id"), own_pad)):
            content["pad_token_id"] = pad
        if self.bos_token_id is not None and is_new:
            content["bos_token_id"] = self.bos_token_id
        return content


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, source: str | Path) -> None:
    """Make sure that a model has a row for every id of its tokenizer.

    Special tokens may lie beyond: Gemma's stands for an image that its text models do not see. They become the
    tokenizer's `foreign_ids`.

    Raises:
      ValueError: another token lies beyond; source, where the tokenizer came from, is named.
    """
    beyond = tokenizer.ids_from(vocab_size)
    if not tokenizer.special_token_ids.issuperset(beyond):
        raise ValueError(f"{source}: the tokenizer's largest id is {beyond[-1]}, but the model has {vocab_size=} ids")
    tokenizer.foreign_ids = frozenset(beyond)


def _eos_token_ids(generation: Mapping[str, Any], own: int | None) -> list[int]:
    # The generation settings list all ids that end a reply; the tokenizer's own token may be missing there.
    ids = id_list(generation.get("eos_token_id"))
    return ids if own is None or own in ids else [*ids, own]
