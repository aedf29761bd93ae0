"""Read the tokenizer that a GGUF file holds in its metadata.

WordPiece and Unigram vocabularies are left out, and byte-level ones whose pre-tokenisation is not in `backends`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tokenizers

from models import backends
from models.backends import CONTROL_TOKEN, USER_DEFINED_TOKEN
from models.tokenizer import Tokenizer

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
# Tokens that end a reply; converters store one "eos", and it may be the one that ends a document.
ENDS_OF_TURN = ("<end_of_turn>", "<|eot_id|>", "<|eom_id|>")


@runtime_checkable
class Metadata(Protocol):
    """What is read of a file.

    Attributes:
      path: the file, for messages.
    """

    path: Path

    def metadata(self, name: str, default: Any = None) -> Any:
        """The value of a field; a missing field without a default is a ValueError."""

    def require(self, name: str, allowed: tuple, default: Any = None) -> Any:
        """As `metadata`, for a field whose value must be one of those allowed."""


def read_tokenizer(file: Metadata) -> Tokenizer:
    """The tokenizer in a file's metadata, with its special tokens, ends of reply, BOS and chat template.

    Raises:
      ValueError: it is of an unsupported kind, or a field is missing or damaged; the file is named.
    """
    kind = file.require("tokenizer.ggml.model", (BYTE_LEVEL, SENTENCEPIECE))
    file.require("tokenizer.ggml.add_eos_token", (False,), False)
    tokens = file.metadata("tokenizer.ggml.tokens")
    ids = {name: _id(file, name, len(tokens)) for name in ("bos", "eos", "eot", "padding", "unknown")}
    texts = {name: None if token_id is None else tokens[token_id] for name, token_id in ids.items()}
    build = _byte_level if kind == BYTE_LEVEL else _sentencepiece
    try:
        backend = build(file, tokens, texts["unknown"])
    except ValueError as error:
        raise ValueError(f"{file.path}: {str(error).removeprefix(f'{file.path}: ')}") from None
    if file.metadata("tokenizer.ggml.add_bos_token", texts["bos"] is not None and _adds_bos(file, kind)):
        if texts["bos"] is None:
            raise ValueError(f"{file.path}: tokenizer.ggml.add_bos_token is true, but there is no bos_token_id")
        backends.add_around(backend, texts["bos"])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return Tokenizer(
        backend,
        bos_token_id=ids["bos"],
        eos_token_ids=_eos_token_ids(backend, ids),
        pad_token_id=ids["eos"] if ids["padding"] is None else ids["padding"],
        chat_template=file.metadata("tokenizer.chat_template", "") or None,
        template_values={name: texts[short] for name, short in names.items() if texts[short] is not None},
    )


def _byte_level(file: Metadata, tokens: Sequence[str], unknown_token: str | None) -> tokenizers.Tokenizer:
    pre_tokenizer = file.require("tokenizer.ggml.pre", tuple(backends.PRE_TOKENIZERS))
    token_types = file.metadata("tokenizer.ggml.token_type")
    if len(token_types) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens have {len(token_types)} types")
    special, added = (
        [token for token, kind in zip(tokens, token_types, strict=True) if kind == wanted]
        for wanted in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
    )
    return backends.byte_level_bpe(tokens, file.metadata("tokenizer.ggml.merges"), special, pre_tokenizer, added)


def _sentencepiece(file: Metadata, tokens: Sequence[str], unknown_token: str | None) -> tokenizers.Tokenizer:
    return backends.sentencepiece_bpe(
        tokens,
        file.metadata("tokenizer.ggml.scores"),
        file.metadata("tokenizer.ggml.token_type"),
        unknown_token,
        add_space_prefix=file.metadata("tokenizer.ggml.add_space_prefix", True),  # llama.cpp's default
    )


def _adds_bos(file: Metadata, kind: str) -> bool:
    # llama.cpp's defaults, where the file does not say.
    return kind == SENTENCEPIECE or file.metadata("tokenizer.ggml.pre") in backends.LLAMA3


def _id(file: Metadata, name: str, num_tokens: int) -> int | None:
    field = f"tokenizer.ggml.{name}_token_id"
    token_id = file.metadata(field, -1)
    if token_id >= num_tokens:
        raise ValueError(f"{file.path}: {field}={token_id} must be one of the {num_tokens} tokens")
    return None if token_id < 0 else token_id


def _eos_token_ids(backend: tokenizers.Tokenizer, ids: dict[str, int | None]) -> list[int]:
    added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
    found = [ids["eos"], ids["eot"], *(added.get(text) for text in ENDS_OF_TURN)]
    return [token_id for token_id in dict.fromkeys(found) if token_id is not None]
