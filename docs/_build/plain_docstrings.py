"""An extension of Griffe: docstrings are plain text with Markdown's code marks, and formulas of their own paragraphs.

A star is a leading axis ([*B, V]) or a product, never emphasis; a paragraph that is one formula becomes code.
"""

import re

import griffe

# A paragraph that is no sentence: "name(...) = ..." from its first character on, and no full stop at its end.
FORMULA = re.compile(r"[\w(|\[][^.\n`]{0,40}? = [^`]*[^.`]$")
CODE = re.compile(r"(`[^`]*`)")


class PlainDocstrings(griffe.Extension):
    """Escapes what Markdown would take for its own, and sets formulas apart."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Changes the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(_plain, obj.docstring.value.split("\n\n")))


def _plain(paragraph: str) -> str:
    if FORMULA.match(paragraph.rstrip()):
        return "```text\n" + paragraph + "\n```"
    pieces = CODE.split(paragraph)
    return "".join(piece if piece.startswith("`") else re.sub(r"([*<])", r"\\\1", piece) for piece in pieces)
