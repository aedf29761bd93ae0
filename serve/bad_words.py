"""Bad words given as text: the token id lists that would spell them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxmask.params import SamplingParams


@runtime_checkable
class Encoding(Protocol):
    """What bad words need of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text."""


def encode_bad_words(tokenizer: Encoding | None, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The id lists of bad words; words that are id lists stay as they are.

    A word is spelled as at the beginning of a text and, where that gives as many ids and another first one, as behind a
    space. Longer spellings behind a space hold the space as a token of its own, and end like the plain one.

    Raises:
      ValueError: a string without a tokenizer, or one that encodes to no ids.

    Source: vLLM, SamplingParams.update_from_tokenizer.
    """
    spellings: list[tuple[int, ...]] = []
    for word in words:
        spellings += _spellings(tokenizer, word) if isinstance(word, str) else [tuple(word)]
    return tuple(spellings)


def with_encoded_bad_words(params: SamplingParams, tokenizer: Encoding | None) -> SamplingParams:
    """`params` with every bad word as id lists; raises as `encode_bad_words`."""
    words = params.bad_words or ()
    if not any(isinstance(word, str) for word in words):
        return params
    return dataclasses.replace(params, bad_words=encode_bad_words(tokenizer, words))


def _spellings(tokenizer: Encoding | None, word: str) -> list[tuple[int, ...]]:
    if tokenizer is None:
        raise ValueError(f"bad_words as text need a tokenizer, which this model does not have. Got {word!r}.")
    plain, behind_space = (tuple(tokenizer.encode(prefix + word.lstrip())) for prefix in ("", " "))
    if not plain:
        raise ValueError(f"bad_words cannot contain a word of no tokens. Got {word!r}.")
    is_new_word = len(behind_space) == len(plain) and behind_space[0] != plain[0]
    return [plain, behind_space] if is_new_word else [plain]
