"""An answer of our own server as a NumPy archive (`Accept: application/x-npz`).

For each completion i: `token_ids_i`, `mask_ids_i` and `mask_offsets_i` (int32), of which token t keeps
mask_ids[mask_offsets[t] : mask_offsets[t + 1]], and `logprobs_i` (float32); `response` holds the JSON of all else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmask.audit import archives
from jaxmask.audit.completion import Completion, Cut
from jaxmask.audit.exchange import Exchange
from jaxmask.audit.prompt import prompt_key
from jaxmask.audit.values import WHOLE_ROW, Problem


def knows(named: Any) -> bool:
    """Whether the arrays of an archive look like an answer."""
    return isinstance(named, Mapping) and "response" in named and any(name.startswith("token_ids_") for name in named)


def completions(exchange: Exchange) -> Iterator[Completion]:
    """One row for each completion."""
    named = exchange.answer
    choices = archives.records({name: array for name, array in named.items() if name != "response"})
    prompt, problems = _prompt(named["response"])
    group = prompt_key(prompt)
    for number, choice in enumerate(choices):
        has_mask = "mask_ids" in choice and "mask_offsets" in choice
        yield Completion(
            exchange.where.name(number),
            choice.get("token_ids"),
            supports=Cut(choice["mask_ids"], choice["mask_offsets"]) if has_mask else None,
            logprobs=choice.get("logprobs"),
            prompt_ids=prompt,
            group="one prompt" if group is None and len(choices) > 1 else group,
            problems=tuple(problems),
        )
        problems = []


def _prompt(response: Any) -> tuple[Any, list[Problem]]:
    try:
        found = json.loads(archives.text(response))
    except (ValueError, RecursionError) as error:
        return None, [Problem(WHOLE_ROW, "response", f"it is no JSON: {error}")]
    return (found.get("prompt_token_ids") if isinstance(found, dict) else None), []
