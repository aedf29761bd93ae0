"""The events of a streamed answer put together again."""

from __future__ import annotations

import itertools
from typing import Any

from jaxmask.audit.values import WHOLE_ROW, Problem, packed, shown

# What one event holds for each of its tokens.
_PER_TOKEN = ("token_ids", "sampling_mask", "logprobs", "sampling_mask_logprobs", "full_logprobs")


def joined(events: list[Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The answer that the events add up to, with its choices in the order of their indices; and what was no event.

    A part that some events of a choice lack has None for their tokens; one that all lack is None.
    """
    parts: dict[int, list[dict[str, Any]]] = {}
    problems: list[Problem] = []
    prompt = None
    for event in events:
        if event == "[DONE]":
            continue
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(choices, list):
            problems.append(Problem(WHOLE_ROW, "stream", f"{shown(event)} stands where an event should"))
            continue
        prompt = event.get("prompt_token_ids") if prompt is None else prompt
        for choice in choices:
            if isinstance(choice, dict) and type(choice.get("index")) is int:
                parts.setdefault(choice["index"], []).append(choice)
            else:
                problems.append(Problem(WHOLE_ROW, "stream", f"{shown(choice)} stands where a choice should"))
    choices = [_choice(index, parts[index], problems) for index in sorted(parts)]
    return {"choices": choices, "prompt_token_ids": prompt}, problems


def _choice(index: int, deltas: list[dict[str, Any]], problems: list[Problem]) -> dict[str, Any]:
    whole: dict[str, Any] = {"index": index}
    for field in _PER_TOKEN:
        pieces = [_piece(field, delta.get(field), problems) for delta in deltas]
        if any(piece is not None for piece in pieces):
            counts = [_num_tokens(delta) for delta in deltas]
            whole[field] = [
                entry
                for piece, count in zip(pieces, counts, strict=True)
                for entry in ([None] * count if piece is None else piece)
            ]
    if "logprobs" in whole:
        is_content = dict in map(type, whole["logprobs"])
        whole["logprobs"] = {"content" if is_content else "token_logprobs": whole["logprobs"]}
    return whole


def _piece(field: str, value: Any, problems: list[Problem]) -> list[Any] | None:
    if field == "logprobs" and isinstance(value, dict):
        value = value.get("content", value.get("token_logprobs"))
    if field == "sampling_mask" and isinstance(value, dict):
        value = _lists(value, problems)
    if value is None or isinstance(value, list):
        return value
    problems.append(Problem(WHOLE_ROW, field, f"{shown(value)} stands where a list should"))
    return None


def _lists(mask: dict[str, Any], problems: list[Problem]) -> list[list[int]] | None:
    if "offsets" not in mask:
        return mask.get("token_ids")
    ids = packed(mask.get("token_ids"), "<i4", "sampling_mask.token_ids", problems)
    offsets = packed(mask["offsets"], "<i4", "sampling_mask.offsets", problems)
    if ids is None or offsets is None:
        return None
    return [ids[begin:end].tolist() for begin, end in itertools.pairwise(offsets.tolist())]


def _num_tokens(delta: dict[str, Any]) -> int:
    token_ids = delta.get("token_ids")
    return len(token_ids) if isinstance(token_ids, list) else 0
