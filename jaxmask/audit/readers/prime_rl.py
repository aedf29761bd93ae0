"""prime-rl's training samples: whole sequences of which some tokens were sampled.

A sample is an object, or a list of its fields in their order, as msgspec writes it to JSON: `token_ids`, `mask` (which
tokens were sampled), `logprobs`, `temperatures` and, further on, `sampling_mask`: `ids` (int32) and `counts` (int32, of
each token of the sequence; 0 where it has no support), `logprobs` (float32, beside the ids) where score centering asks
for them. The arrays are lists, or base64 of little-endian bytes. prime-rl itself sends samples as msgpack and keeps no
file of JSON: this is its records as JSON lines, or an archive of arrays `token_ids_0`, `sampling_mask_ids_0`, ...

The row begins with the first sampled token; what stands before it is the prompt.

Source: prime-rl, src/prime_rl/transport/types.py, TrainingSample and SamplingMask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxmask.audit import values
from jaxmask.audit.completion import Completion, Cut, Fields
from jaxmask.audit.exchange import Exchange
from jaxmask.audit.prompt import prompt_key
from jaxmask.audit.requests import raised
from jaxmask.audit.rows import Setting
from jaxmask.audit.values import WHOLE_ROW, Problem, shown

# As msgspec orders them (array_like).
_ORDER = ("token_ids", "mask", "logprobs", "temperatures", "env_name")
_MASK_PLACE = 13
_MASK_ORDER = ("ids", "counts", "logprobs")
FIELDS = Fields(loss_mask="mask", kept_logprobs="sampling_mask.logprobs")


def knows(answer: Any) -> bool:
    """Whether a value looks like a sample."""
    if isinstance(answer, list):
        return len(answer) >= len(_ORDER) and isinstance(answer[0], list) and isinstance(answer[4], str)
    if not isinstance(answer, dict) or "token_ids" not in answer:
        return False
    mask = answer.get("sampling_mask")
    has_counts = "sampling_mask_counts" in answer or (isinstance(mask, dict) and "counts" in mask)
    return has_counts or ("mask" in answer and "temperatures" in answer)


def completions(exchange: Exchange) -> Iterator[Completion]:
    """The row of a sample."""
    problems: list[Problem] = []
    sample = _named(exchange.answer)
    ids, counts, kept = _mask(sample, problems)
    parts = {
        "token_ids": sample.get("token_ids"),
        "loss_mask": sample.get("mask"),
        "logprobs": sample.get("logprobs"),
        "counts": counts,
    }
    temperature = _temperature(sample.get("temperatures"), parts["loss_mask"], problems)
    are_rows = all(part is None or values.is_row(part) for part in (ids, kept))
    begin = _begin(parts) if are_rows else 0
    prompt = None
    if begin:
        prompt = parts["token_ids"][:begin]
        num_before = int(np.sum(parts["counts"][:begin])) if counts is not None else 0
        ids, kept = None if ids is None else ids[num_before:], None if kept is None else kept[num_before:]
        parts = {name: None if part is None else part[begin:] for name, part in parts.items()}
    yield Completion(
        exchange.where.name(),
        parts["token_ids"],
        supports=None if ids is None else Cut(ids, counts=parts["counts"], is_none_empty=True),
        logprobs=parts["logprobs"],
        kept_logprobs=kept,
        loss_mask=parts["loss_mask"],
        setting=raised(Setting(temperature=temperature)),
        group=prompt_key(prompt),
        prompt_ids=prompt,
        fields=FIELDS,
        problems=tuple(problems),
    )


def _named(answer: Any) -> Mapping[str, Any]:
    if isinstance(answer, Mapping):
        return answer
    named = dict(zip(_ORDER, answer, strict=False))
    return named | ({"sampling_mask": answer[_MASK_PLACE]} if len(answer) > _MASK_PLACE else {})


def _mask(sample: Mapping[str, Any], problems: list[Problem]) -> tuple[Any, Any, Any]:
    """Ids, counts and log-probabilities, each a list, an array or something else; None for what is not there."""
    mask = sample.get("sampling_mask")
    if mask is None:
        mask = {name: sample[f"sampling_mask_{name}"] for name in _MASK_ORDER if f"sampling_mask_{name}" in sample}
    if isinstance(mask, list):
        mask = dict(zip(_MASK_ORDER, mask, strict=False))
    if not isinstance(mask, dict):
        problems.append(Problem(WHOLE_ROW, FIELDS.supports, f"{shown(mask)} stands where ids and counts should"))
        return None, None, None
    if bool(mask) and not {"ids", "counts"} <= set(mask):
        problems.append(Problem(WHOLE_ROW, FIELDS.supports, f"ids and counts should stand in {shown(mask)}"))
        return None, None, None
    ids, counts, kept = (
        values.unpacked(mask.get(name), dtype, f"{FIELDS.supports}.{name}", problems)
        for name, dtype in zip(_MASK_ORDER, ("<i4", "<i4", "<f4"), strict=True)
    )
    # Without one of them the other says nothing; what was wrong is known by now.
    return (None, None, None) if ids is None or counts is None else (ids, counts, kept)


def _begin(parts: Mapping[str, Any]) -> int:
    """Where the first sampled token stands; 0 where the parts do not fit together: then all of them are looked at."""
    given = [part for part in parts.values() if part is not None]
    if (
        parts["token_ids"] is None
        or parts["loss_mask"] is None
        or not all(map(values.is_row, given))
        or len({len(part) for part in given}) != 1
    ):
        return 0
    flaws: list[Problem] = []
    flags = values.flags(parts["loss_mask"], FIELDS.loss_mask, flaws)
    counts = np.zeros(0, np.int64) if parts["counts"] is None else values.integers(parts["counts"], "counts", flaws)
    if flaws or flags is None or counts is None or (counts < 0).any():
        return 0
    return int(flags.argmax()) if flags.any() else 0


def _temperature(given: Any, mask: Any, problems: list[Problem]) -> float | None:
    """That of all sampled tokens; None where they differ, or where there is none."""
    if given is None:
        return None
    found = values.numbers(given, "temperatures", problems)
    flags = None if mask is None else values.flags(mask, FIELDS.loss_mask, [])
    if found is None:
        return None
    numbers = found[0][flags] if flags is not None and len(flags) == len(found[0]) else found[0]
    return float(numbers[0]) if len(numbers) and (numbers == numbers[0]).all() else None
