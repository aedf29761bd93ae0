"""What a completion was sampled with and from, as far as the request beside it says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxmask.audit.rows import Setting
from jaxmask.audit.values import WHOLE_ROW, Problem, is_integer, shown
from jaxmask.params import MIN_TEMPERATURE
from jaxmask.settings import LOOKS_BACK

# What both vLLM's token endpoint and SGLang's take where a request is silent.
SILENT = Setting(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
# As a request in JSON has them, with SGLang's name for one.
_LOOKS_BACK = {**LOOKS_BACK, "bad_words": [], "min_new_tokens": LOOKS_BACK["min_tokens"]}


def setting_of(params: Any, problems: list[Problem], *, silent: Setting, field: str = "sampling_params") -> Setting:
    """The settings in a request's parameters; those of `silent` where it does not name them.

    Args:
      params: a mapping; None where there is none.
      problems: those found are added here.
      silent: what holds for parameters that are left out or null.
      field: what the parameters are called, for problems.
    """
    if params is None:
        return silent
    if not isinstance(params, Mapping):
        problems.append(Problem(WHOLE_ROW, field, f"{shown(params)} stands where an object should"))
        return silent
    given: dict[str, Any] = {}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = params.get(name)
        kinds = (int,) if name == "top_k" else (int, float)
        if value is not None and (type(value) not in kinds or abs(value) >= 2**63):
            problems.append(Problem(WHOLE_ROW, f"{field}.{name}", f"{shown(value)} stands where a number should"))
        elif value is not None and not _is_in_range(name, value):
            problems.append(Problem(WHOLE_ROW, f"{field}.{name}", f"{shown(value)} is outside of its range"))
        elif value is not None:
            given[name] = value if name == "top_k" else float(value)
    return dataclasses.replace(
        silent,
        **given,
        **_ends(params),
        allowed_token_ids=_allowed(params.get("allowed_token_ids"), f"{field}.allowed_token_ids", problems),
        looks_back=next((name for name, off in _LOOKS_BACK.items() if params.get(name) not in (None, off)), None),
    )


def _is_in_range(name: str, value: float | int) -> bool:
    """Whether an engine takes the value; a temperature of 0 or less is a matter of its own."""
    if name == "temperature":
        return math.isfinite(value)
    return value >= -1 if name == "top_k" else 0 < value <= 1 if name == "top_p" else 0 <= value <= 1


def _ends(params: Mapping[str, Any]) -> dict[str, Any]:
    """What ends a completion, and whether log-probabilities were asked for, where that is said as it should be."""
    stop_ids = params.get("stop_token_ids")
    is_ids = isinstance(stop_ids, list) and set(map(type, stop_ids)) <= {int}
    return {
        "stop_token_ids": tuple(stop_ids) if isinstance(stop_ids, list) and is_ids else (),
        "ignore_eos": params.get("ignore_eos") is True,
    }


def _allowed(ids: Any, field: str, problems: list[Problem]) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if isinstance(ids, list) and ids and all(map(is_integer, ids)):
        return tuple(ids)
    problems.append(Problem(WHOLE_ROW, field, f"{shown(ids)} stands where a list of ids should"))
    return None


def raised(setting: Setting) -> Setting:
    """The setting as vLLM and our server take it: a temperature above 0 is at least 0.01."""
    temperature = setting.temperature
    if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
        return dataclasses.replace(setting, temperature=MIN_TEMPERATURE)
    return setting
