"""Texts of single tokens, for log-probabilities."""

from __future__ import annotations

import functools
from typing import Any

from jaxmask.wire import Logprob


def with_texts(dicts: list[dict[int, Logprob]], tokenizer: Any) -> list[dict[int, Logprob]]:
    """The same with each token's text, where there is a tokenizer."""
    if tokenizer is None:
        return dicts
    return [
        {token_id: entry._replace(decoded_token=_text_of(tokenizer, token_id)) for token_id, entry in entries.items()}
        for entries in dicts
    ]


@functools.lru_cache(maxsize=65536)
def _text_of(tokenizer: Any, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)
