"""How a configuration names reward functions: "answer", "package.module:function", "file.py:function", "...=0.5"."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

ANSWER = "answer"
FORMS = '"answer", "package.module:function" or "file.py:function", with an optional weight as in "answer=0.5"'
# Figures that the rewards write beside the means of the functions.
RESERVED = ("mean", "std", "min", "max", "num_failed", "num_timeouts")
_WEIGHT = re.compile(r"(?P<target>.*)=(?P<weight>[^=:/\\]*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """A reward function by name.

    Attributes:
      name: of the function, as the metrics show it.
      target: "answer", or "module:function", or "file.py:function".
      weight: finite; what its score counts in the sum.
    """

    name: str
    target: str
    weight: float = 1.0


def parse_rewards(entries: Sequence[str]) -> tuple[RewardSpec, ...]:
    """The reward functions that entries of a configuration name.

    Raises:
      ValueError: there are none, one is written wrongly, or two have the same name.
    """
    if not entries:
        raise ValueError(f"rewards must name at least one function: {FORMS}; got none.")
    specs = tuple(_parsed(entry) for entry in entries)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"rewards must have names that differ, got {names.count(name)} called {name!r}.")
    return specs


def _parsed(entry: str) -> RewardSpec:
    match = _WEIGHT.fullmatch(entry)
    target, weight = (entry, 1.0) if match is None else (match["target"], _weight(entry, match["weight"]))
    module, colon, function = target.rpartition(":")
    is_known = target == ANSWER or (colon and module and function.isidentifier())
    if not is_known:
        raise ValueError(f"rewards must each be {FORMS}, got {entry!r}.")
    if function in RESERVED or (function == ANSWER and colon):
        raise ValueError(f"rewards must not be called {', '.join((ANSWER, *RESERVED))}, got {entry!r}.")
    return RewardSpec(function, target, weight)


def _weight(entry: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(f"rewards must have finite numbers as weights, got {entry!r}.")
    return weight
