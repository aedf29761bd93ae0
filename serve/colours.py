"""Completions for the terminal: each token in the colour of its support's size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from rich.text import Text

from models.text_stream import TextStream
from serve.outputs import CompletionOutput

# The most ids of each band, what it is called, and its style; colours of the terminal's own palette.
BANDS = (
    (1, "1 id", ""),
    (2, "2", "cyan"),
    (8, "3-8", "green"),
    (32, "9-32", "yellow"),
    (np.inf, "33+", "bold magenta"),
)
NEWLINE = "\u21b5\n"
# A model may write escape sequences, which must not reach the terminal.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@runtime_checkable
class Streaming(Protocol):
    """What the view needs of a tokenizer."""

    def stream(self, skip_special_tokens: bool) -> TextStream:
        """An empty stream that decodes ids as they come."""


def coloured(completion: CompletionOutput, tokenizer: Streaming, *, sizes: bool = False) -> Text:
    """All tokens of a completion, special ones and a cut stop string included.

    A character made of several tokens has the colour of its last one. Newlines are marked, control characters
    written out.

    Args:
      completion: tokens without a mask stay without colour.
      tokenizer: the model's.
      sizes: the number of ids in brackets behind each token, for screens without colour.
    """
    mask = completion.sampling_mask
    counts = [None] * len(completion.token_ids) if mask is None else mask.counts.tolist()
    text = Text()
    for piece, count in zip(_pieces(completion.token_ids, tokenizer), counts, strict=True):
        text.append(_marked(piece, count if sizes else None), style_of(count))
    return text


def style_of(count: int | None) -> str:
    """The style of a token drawn from `count` ids; the plain one where that is not known."""
    return BANDS[0][2] if count is None else next(style for most, _, style in BANDS if count <= most)


def legend() -> Text:
    """What the colours stand for, on one line."""
    return Text("  ").join([Text("ids in the support:"), *(Text(name, style) for _, name, style in BANDS)])


def summary(completion: CompletionOutput) -> str:
    """Tokens, how they ended, and the sizes of their supports, on one line."""
    ended: str = completion.finish_reason or "not finished"
    if completion.stop_reason is not None:
        ended += f" at {completion.stop_reason!r}"
    parts = [f"{len(completion.token_ids)} tokens ({ended})"]
    if completion.sampling_mask is not None and completion.token_ids:
        counts = completion.sampling_mask.counts
        parts.append(f"support mean {counts.mean():.1f}, median {np.median(counts):g}, max {counts.max()}")
        parts.append(f"{np.mean(counts == 1):.0%} of one id")
    return "   ".join(parts)


def _pieces(token_ids: list[int], tokenizer: Streaming) -> Iterator[str]:
    stream = tokenizer.stream(skip_special_tokens=False)
    for position, token_id in enumerate(token_ids):
        piece = stream.push([token_id])
        yield piece + stream.finish() if position == len(token_ids) - 1 else piece


def _marked(piece: str, size: int | None) -> str:
    shown = CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", piece).replace("\n", NEWLINE)
    if size is None:
        return shown
    # The size stays on the line of its token.
    return f"{shown.removesuffix(chr(10))}[{size}]{chr(10) * shown.endswith(chr(10))}"
