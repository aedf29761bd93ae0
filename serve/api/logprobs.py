"""Log-probabilities in OpenAI's two shapes, and those of prompts in vLLM's.

Only ids inside of a support have a log-probability: lists are shorter where the support is, and a number that is not
there is null.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxmask.wire import Logprob
from models.text_stream import INCOMPLETE

Entries = Mapping[int, Logprob]
PromptEntries = Sequence[Entries | None]


class Offsets:
    """Where tokens begin in a text that is decoded as they come; a token without text begins where the next one does.

    Tokens that share a character begin where that begins. Text past a stop string is counted as if it were there.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, begin: int = 0):
        """Of a text whose first token begins at `begin`; all of them do without a tokenizer."""
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stream = None if tokenizer is None else tokenizer.stream(skip_special_tokens)
        self._end = begin

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The characters before each of the next tokens."""
        return [self._begin(token_id) for token_id in token_ids]

    def _begin(self, token_id: int) -> int:
        begin = self._end
        if self._stream is None:
            return begin
        settled, own = self._stream.push([token_id]), self._tokenizer.decode([token_id], skip_special_tokens=self._skip)
        self._end += len(settled)
        # What waited in vain for the rest of a character goes before this token.
        is_whole = own and INCOMPLETE not in own and settled.endswith(own)
        return self._end - len(own) if is_whole else begin


@runtime_checkable
class SpellsTokens(Protocol):
    """A tokenizer that knows the bytes of its tokens, of which a character may take several."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text."""


@dataclasses.dataclass(frozen=True)
class TokenTexts:
    """How tokens are written beside their log-probabilities.

    Attributes:
      tokenizer: the model's; None where it has none.
      as_ids: write "token_id:17" instead of a token's text, which two tokens may share.
    """

    tokenizer: Any
    as_ids: bool

    def of(self, token_id: int) -> str:
        """One token."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def spoken(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        """One token with its bytes and its value."""
        text = self.of(token_id)
        is_text = not self.as_ids and isinstance(self.tokenizer, SpellsTokens)
        spelt = self.tokenizer.token_bytes(token_id) if is_text else text.encode()
        return {"token": text, "logprob": logprob, "bytes": list(spelt)}

    def likeliest(self, entries: Entries) -> dict[str, float]:
        """Values by text; of several tokens of one text, the drawn one's, or the greatest."""
        by_text: dict[str, float] = {}
        for token_id, entry in entries.items():
            by_text.setdefault(self.of(token_id), entry.logprob)
        return by_text


def completion_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], entries: PromptEntries, offsets: Sequence[int]
) -> dict[str, list[Any]]:
    """The shape of /v1/completions.

    Args:
      texts: how tokens are written.
      token_ids: of a choice, or of a delta.
      entries: for each token, by id; None where nothing predicts it.
      offsets: where each begins in the text.
    """
    pairs = list(zip(token_ids, entries, strict=True))
    return {
        "text_offset": list(offsets),
        "token_logprobs": [_value(found, token_id) for token_id, found in pairs],
        "tokens": [texts.of(token_id) for token_id in token_ids],
        "top_logprobs": [None if found is None else texts.likeliest(found) for _, found in pairs],
    }


def chat_logprobs(texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[Entries], num: int) -> dict[str, Any]:
    """The shape of /v1/chat/completions.

    Args:
      texts: how tokens are written.
      token_ids: of a choice, or of a delta.
      entries: for each token, by id: the drawn one, then the likeliest.
      num: how many of the likeliest were asked for; -1 for all.
    """
    content = []
    for token_id, found in zip(token_ids, entries, strict=True):
        tops = [texts.spoken(top_id, entry.logprob) for top_id, entry in _likeliest(found, num).items()]
        content.append(texts.spoken(token_id, _value(found, token_id)) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: PromptEntries | None) -> list[dict[str, Any] | None] | None:
    """For each token of a prompt, by id: value, rank and text; None for the first."""
    if entries is None:
        return None
    return [
        None if found is None else {str(token_id): entry._asdict() for token_id, entry in found.items()}
        for found in entries
    ]


def _likeliest(entries: Entries, num: int) -> Entries:
    """The likeliest ones alone, in their order: one entry more than was asked for is that of a less likely draw."""
    ranked = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return dict(ranked if num == -1 else ranked[:num])


def _value(entries: Entries | None, token_id: int) -> float | None:
    return entries[token_id].logprob if entries is not None and token_id in entries else None
