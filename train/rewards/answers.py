"""The answer within a completion."""

from __future__ import annotations

import re

_OPEN, _CLOSE = "<answer>", "</answer>"
# A sign counts where no digit stands before it: "5-9" is a difference.
_NUMBER = re.compile(r"(?:(?<![0-9])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_INTEGER = re.compile(r"-?\d+")


def extract_answer(completion: str, *, is_number: bool = False) -> str:
    """The answer that a completion gives, without the spaces around it; "" where it gives none.

    What comes after the last "</think>" counts, and of it the first of these that is there:
    the last `<answer>...</answer>`; the last `\\boxed{...}`; where a number is asked for, the last number; the last
    line that is not empty.

    Args:
      completion: the text.
      is_number: whether the expected answer is a number.
    """
    text = completion.rpartition("</think>")[2]
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, max(end, 0))
    if start >= 0:
        return text[start + len(_OPEN) : end].strip()
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip()
    if is_number and (number := last_number(text)) is not None:
        return number
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} whose braces close, or None."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        opened = 0
        for place in range(start + len("\\boxed"), end):
            opened += {"{": 1, "}": -1}.get(text[place], 0)
            if opened == 0:
                return text[start + len("\\boxed{") : place]
        # Nothing closes it, so those before it close before it or never.
        end = start
    return None


def last_number(text: str) -> str | None:
    """The last number written in a text, as it is written, or None."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def last_integer(text: str) -> str | None:
    """The last integer of a text, as it is written, or None."""
    found = _INTEGER.findall(text)
    return found[-1] if found else None


def plain_number(text: str) -> str:
    """A number without thousands' commas, currency signs and zeros that say nothing; other texts stripped."""
    shorn = text.strip().strip("$€£% ").replace(",", "").removeprefix("+").rstrip(".")
    if not re.fullmatch(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", shorn):
        return shorn
    sign, digits = ("-", shorn[1:]) if shorn.startswith("-") else ("", shorn)
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    is_zero = whole == "0" and not fraction
    return ("" if is_zero else sign) + whole + (f".{fraction}" if fraction else "")
