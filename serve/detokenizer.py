"""Text of a completion while its tokens come, cut at stop strings.

Stop strings are searched in the text, wherever tokens begin and end. The one that is complete first ends the
completion, and of several complete at the same character the first of the list: so the text does not depend on how it
was cut into tokens. Text is cut, tokens are not: the token that completes the stop string is the last, and whole.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxmask.params import NO_TEXT_TO_STOP, SamplingParams
from models.text_stream import TextStream


@runtime_checkable
class Streaming(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def stream(self, skip_special_tokens: bool) -> TextStream:
        """An empty stream that decodes ids as they come."""


class Detokenizer:
    """Text of one completion; a push costs time for the new ids and their characters alone.

    A request without text (no tokenizer, or detokenize=False) counts its tokens, and its text stays empty.

    Attributes:
      num_tokens: tokens kept so far: all pushed ones, up to the one that completed a stop string.
      stop_reason: the stop string found, or None.
    """

    def __init__(self, tokenizer: Streaming | None, params: SamplingParams):
        """An empty completion.

        Args:
          tokenizer: the model's, or None where it has none.
          params: its `stop`, `include_stop_str_in_output`, `min_tokens`, `skip_special_tokens` and `detokenize` count.
            A stop string is looked for where more than min_tokens tokens are there; what is complete before stays.

        Raises:
          ValueError: stop strings without a tokenizer.
        """
        if params.stop and tokenizer is None:
            raise ValueError(NO_TEXT_TO_STOP)
        shown_by = tokenizer if params.detokenize else None
        self._stream = None if shown_by is None else shown_by.stream(params.skip_special_tokens)
        self._stops = [_Search(stop) for stop in params.stop or ()]
        self._min_tokens, self._includes_stop = params.min_tokens, params.include_stop_str_in_output
        self._written = io.StringIO()
        self._num_characters = self._num_given = 0
        self._is_finished = False
        self.num_tokens = 0
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far, cut at the stop string, with what `delta` still holds back."""
        return self._written.getvalue()

    def push(self, token_ids: Sequence[int], *, ends_with_stop_id: bool = False) -> bool:
        """Takes the next ids; returns whether a stop string was found, after which further ids are dropped.

        Args:
          token_ids: in any number; several at once give what they give one by one.
          ends_with_stop_id: the last one is EOS or a stop id that ends the completion: a token without text, unless
            include_stop_str_in_output.
        """
        for position, token_id in enumerate(token_ids):
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            is_silent = ends_with_stop_id and position == len(token_ids) - 1 and not self._includes_stop
            if self._stream is not None and not is_silent:
                self._write(self._stream.push([token_id]))
        return self.stop_reason is not None

    def finish(self) -> bool:
        """Ends the text, after which `delta` holds nothing back; returns what `push` returns.

        Bytes that waited for the rest of a character are written, and may complete a stop string.
        """
        if self._stream is not None and self.stop_reason is None:
            self._write(self._stream.finish())
        self._is_finished = True
        return self.stop_reason is not None

    def delta(self) -> str:
        """The text since the last call that can be given out: all but an end that may begin a stop string.

        The deltas, joined, are `text` once a stop string was found or `finish` was called.
        """
        end = self._num_characters - self._num_held()
        self._written.seek(self._num_given)
        new = self._written.read(end - self._num_given)
        self._num_given = end
        return new

    def _num_held(self) -> int:
        # With the stop string in the output, whatever may begin one belongs to the text.
        is_settled = self._is_finished or self.stop_reason is not None or self._includes_stop
        return 0 if is_settled else max((stop.num_matched for stop in self._stops), default=0)

    def _write(self, text: str) -> None:
        kept = self._search(text) if self._stops else text
        self._written.seek(self._num_characters)
        self._written.write(kept)
        self._num_characters += len(kept)
        self._written.truncate(self._num_characters)

    def _search(self, text: str) -> str:
        """The part of the new text to keep; a stop string may also reach back into what was written."""
        for end, character in enumerate(text, start=1):
            complete = [stop.text for stop in self._stops if stop.take(character)]
            if complete and self.num_tokens > self._min_tokens:
                self.stop_reason = complete[0]
                kept = end if self._includes_stop else end - len(complete[0])
                self._num_characters += min(kept, 0)
                return text[: max(kept, 0)]
        return text


class _Search:
    """One string, searched in characters that come one by one (Knuth, Morris and Pratt).

    Attributes:
      text: the string.
      num_matched: characters at the end of what came that may begin it: the most that are its beginning, not all of it.
    """

    def __init__(self, text: str):
        self.text = text
        self.num_matched = 0
        self._shorter = [0]  # of each beginning: its longest end that is a shorter beginning
        for character in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def take(self, character: str) -> bool:
        """Whether this character completes the string."""
        self.num_matched = self._longer(self.num_matched, character)
        is_complete = self.num_matched == len(self.text)
        if is_complete:
            self.num_matched = self._shorter[-1]
        return is_complete

    def _longer(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + (self.text[num_matched] == character)
