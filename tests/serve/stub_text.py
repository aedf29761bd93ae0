"""A tokenizer whose vocabulary is a list of pieces: each id's text is its piece."""

from models.text_stream import TextStream


class Pieces:
    """Pieces are strings, bytes (single ones are those of byte fallback), or special where they begin with "<|"."""

    def __init__(self, *pieces):
        self._pieces = pieces
        single = [isinstance(piece, bytes) and len(piece) == 1 for piece in pieces]
        self.byte_tokens = {token_id: pieces[token_id][0] for token_id, is_byte in enumerate(single) if is_byte}

    def is_shown(self, token_id, skip_special_tokens):
        piece = self._pieces[token_id]
        return not (skip_special_tokens and isinstance(piece, str) and piece.startswith("<|"))

    def decode(self, token_ids, skip_special_tokens=True):
        shown = [self._pieces[token_id] for token_id in token_ids if self.is_shown(token_id, skip_special_tokens)]
        return b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in shown).decode(
            errors="replace"
        )

    def stream(self, skip_special_tokens=True):
        return TextStream(self, skip_special_tokens)
