"""How much a request may say. All of its settings lie in arrays as large as the largest of them, for every row."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxmask.params import SamplingParams

MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 2**16
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_IDS = 64
# No token of these vocabularies has as many characters.
_MAX_TOKEN_CHARACTERS = 512


def check_sizes(params: SamplingParams) -> None:
    """Raises ValueError where settings are more than are taken; to be called before texts become ids."""
    stop, words = params.stop or (), params.bad_words or ()
    if len(stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(stop)}.")
    num_characters = sum(map(len, stop))
    if num_characters > MAX_STOP_CHARACTERS:
        raise ValueError(f"stop must have at most {MAX_STOP_CHARACTERS} characters in all, got {num_characters}.")
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words must hold at most {MAX_BAD_WORDS} words, got {len(words)}.")
    for word in words:
        _check_word(len(word), MAX_BAD_WORD_IDS * (_MAX_TOKEN_CHARACTERS if isinstance(word, str) else 1))


def without_repeats(params: SamplingParams) -> SamplingParams:
    """`params`, bad words as ids, without what is said twice; raises ValueError where a bad word has too many ids."""
    for word in params.bad_words or ():
        _check_word(len(word), MAX_BAD_WORD_IDS)
    given = {name: getattr(params, name) for name in ("stop_token_ids", "allowed_token_ids", "bad_words")}
    once = {name: tuple(dict.fromkeys(values)) for name, values in given.items() if values}
    changed: dict[str, Any] = {name: values for name, values in once.items() if len(values) < len(given[name])}
    return dataclasses.replace(params, **changed) if changed else params


def _check_word(length: int, most: int) -> None:
    if length > most:
        raise ValueError(f"bad_words must have at most {MAX_BAD_WORD_IDS} token ids each, got one of length {length}.")
