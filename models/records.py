"""Frozen records of plain values from what a JSON file holds, with one clear line when it does not fit."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_values(kind: type[T], values: Mapping[str, Any]) -> T:
    """The record of that class with these fields; lists become tuples, and the class checks its own ranges.

    Raises:
      ValueError: a field is missing, unknown or of another type, or the class refuses a value.
    """
    hints = get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown fields {unknown} of {kind.__name__}; allowed are {sorted(known)}.")
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in arguments.items():
        if not _is_of_type(value, hints[name]):
            raise ValueError(f"{name} must be of type {_described(hints[name])}, got {value!r}.")
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} does not fit: {error}.") from error


def _is_of_type(value: Any, hint: Any) -> bool:
    """Whether a value fits an annotation; that a literal is among its choices is for the class to say."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_is_of_type(value, one) for one in inner)
    if origin is Literal:
        return True
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of_type(one, inner[0]) for one in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _described(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)
