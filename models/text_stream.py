"""Text of tokens as they come, without ever giving out half of a character."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

INCOMPLETE = "\ufffd"
# The window is decoded for every token, so it is cut back to its last ids once it holds more than MAX_WINDOW.
MAX_WINDOW, CONTEXT = 32, 16
# A cut may fall inside of a character (at most 3 more bytes); behind so many characters both decodings agree again.
SYNCHRONISED = 4


@runtime_checkable
class Decoding(Protocol):
    """What a stream needs of a tokenizer.

    Attributes:
      byte_tokens: the byte each id stands for in a vocabulary with byte fallback, else empty.
    """

    byte_tokens: Mapping[int, int]

    def is_shown(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` lets an id into the text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of some ids."""


class TextStream:
    """Incremental `decode`: the pieces, joined, are the text of all ids, however these are split into pushes.

    Ids are decoded together with some before them: a token's text depends on its neighbours, where tokens hold parts
    of characters and where the first loses its leading space. Two things wait for the next ids:

    - Byte-level vocabularies: a last U+FFFD, which may be the beginning of a character.
    - Byte fallback: a run of byte tokens at the end, because one wrong byte turns all bytes of its run into U+FFFD.
      Once a run is broken nothing can mend it, and its bytes come one by one.
    """

    def __init__(self, tokenizer: Decoding, skip_special_tokens: bool = True):
        """An empty stream; skip_special_tokens as for `decode`."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._start()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids settle; "" while a character is incomplete."""
        return "".join(self._take(int(token_id)) for token_id in token_ids)

    def finish(self) -> str:
        """The text still held back, incomplete characters as U+FFFD; the stream is then empty and may be used again."""
        rest = self._decode(self._window)[self._num_given :]
        self._start()
        return rest

    def _start(self) -> None:
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text that were given out
        self._end_run()

    def _end_run(self) -> None:
        self._run = codecs.getincrementaldecoder("utf-8")()  # checks the run of byte tokens that ends the window
        self._is_broken = False

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _take(self, token_id: int) -> str:
        if not self._tokenizer.is_shown(token_id, self._skip):
            return ""
        byte = self._tokenizer.byte_tokens.get(token_id)
        if byte is not None:
            return self._take_byte(token_id, byte)
        self._window.append(token_id)
        self._end_run()
        text = self._decode(self._window)
        may_change = text.endswith(INCOMPLETE) and not self._tokenizer.byte_tokens
        given = self._give(text, len(text) - may_change)
        if len(self._window) > MAX_WINDOW:
            self._shrink(num_held=len(text) - self._num_given)
        return given

    def _take_byte(self, token_id: int, byte: int) -> str:
        if self._is_broken:  # the window keeps the bytes that broke the run: no need for more of them
            return self._decode([*self._window, token_id])[self._num_given :]
        self._window.append(token_id)
        try:
            self._run.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._is_broken = True
            text = self._decode(self._window)
            return self._give(text, len(text))
        return ""

    def _give(self, text: str, end: int) -> str:
        given = text[self._num_given : end]
        self._num_given = end
        return given

    def _shrink(self, num_held: int) -> None:
        context = self._window[-CONTEXT:]
        num_given = len(self._decode(context)) - num_held
        if num_given >= SYNCHRONISED:
            self._window, self._num_given = context, num_given
