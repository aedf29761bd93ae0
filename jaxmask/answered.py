"""A completion as another engine answered it: plain values, whole, or refused by name.

What they hold is checked where they become a rollout (`jaxmask.received`); here only that they are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmask.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Answered:
    """One completion, its prompt and its settings; what the lists hold is whatever was sent.

    Attributes:
      prompt: ids, as the model read them.
      token_ids: of the completion.
      logprobs: of each token over its support; None where the engine had none.
      supports: the ids that each token was drawn from.
      params: what it was sampled with; n = 1.
      policy_versions: of each token; None where the engine does not number its weights.
    """

    prompt: Sequence[Any]
    token_ids: Sequence[Any]
    logprobs: Sequence[Any]
    supports: Sequence[Any]
    params: SamplingParams
    policy_versions: Sequence[int | None] | None = None


def part(holder: Any, name: str, where: str, hint: str = "") -> Any:
    """What stands under a name; raises ValueError where there is nothing, or null, with a hint at what to ask for."""
    if not isinstance(holder, Mapping):
        raise ValueError(f"{where} must be a JSON object with {name!r}, got {type(holder).__name__}.")
    if holder.get(name) is None:
        raise ValueError(f"{where} has no {name!r}{hint and ': ' + hint}.")
    return holder[name]


def parts(holder: Any, name: str, where: str, hint: str = "") -> list[Any]:
    """The same of a list, or of an array."""
    found = part(holder, name, where, hint)
    found = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"{name!r} of {where} must be a list, got {found!r}.")
    return list(found)


def as_params(where: str, settings: Mapping[str, Any]) -> SamplingParams:
    """Settings of one request; raises ValueError, which names the request, for values that are not allowed."""
    try:
        return SamplingParams(**settings)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
