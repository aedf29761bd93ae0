"""Sampled completions as a page shows them: short enough, and each token with its class and its words."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_STEPS, MAX_PER_STEP, MAX_TOKENS, MAX_PROMPT = 5, 3, 400, 1500
# Largest support size of each shade, of which 0 is for one id, and least probability of each underline.
SIZE_LIMITS = (1, 2, 4, 8, 16, 32, 64)
PROBABILITY_LIMITS = (0.9, 0.5, 0.2, 0.05)


@dataclasses.dataclass(frozen=True)
class Token:
    """A token on the page.

    Attributes:
      text: as it reads.
      shade: 0 (one id) to len(SIZE_LIMITS), by the size of its support.
      line: 0 (likely) to len(PROBABILITY_LIMITS), by its probability.
      tip: what hovering shows.
    """

    text: str
    shade: int
    line: int
    tip: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """A completion on the page; `num_cut` tokens at its end are not shown."""

    prompt: str
    tokens: list[Token]
    num_cut: int
    reward: str
    is_exact: bool
    finish_reason: str


def read_samples(path: Path) -> dict[int, list[dict[str, Any]]]:
    """The lines of samples.jsonl by step, ascending; lines that are no samples are passed over."""
    found: dict[int, list[dict[str, Any]]] = {}
    if not path.exists():
        return found
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                sample = json.loads(line)
            except ValueError:
                continue
            if isinstance(sample, dict) and isinstance(sample.get("step"), int):
                found.setdefault(sample["step"], []).append(sample)
    return dict(sorted(found.items()))


def shown_samples(by_step: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, list[Sample]]:
    """A few samples of a few steps, spread over the run, the first and the last among them."""
    steps = list(by_step)
    last = len(steps) - 1
    chosen = sorted({round(place * last / (MAX_STEPS - 1)) for place in range(MAX_STEPS)}) if steps else []
    # A step that was done again after a kill has its samples twice: the later ones count.
    return {steps[index]: [_sample(one) for one in by_step[steps[index]][-MAX_PER_STEP:]] for index in chosen}


def _sample(sample: Mapping[str, Any]) -> Sample:
    tokens, prompt = _list(sample, "tokens"), str(sample.get("prompt", ""))
    reward = sample.get("reward")
    return Sample(
        prompt=prompt if len(prompt) <= MAX_PROMPT else "\u2026" + prompt[-MAX_PROMPT:],
        tokens=[_token(sample, place, str(text)) for place, text in enumerate(tokens[:MAX_TOKENS])],
        num_cut=max(len(tokens) - MAX_TOKENS, 0),
        reward=f"{reward:.3g}" if isinstance(reward, int | float) else "?",
        is_exact=sample.get("exact") is True,
        finish_reason=str(sample.get("finish_reason", "")),
    )


def _token(sample: Mapping[str, Any], place: int, text: str) -> Token:
    support, logprob = _at(sample, "sampling_mask", place), _at(sample, "logprobs", place)
    size = len(support) if isinstance(support, list) else None
    is_number = isinstance(logprob, int | float) and not math.isnan(logprob)
    probability = math.exp(min(logprob, 0.0)) if is_number else None
    return Token(
        text,
        shade=0 if size is None else sum(size > limit for limit in SIZE_LIMITS),
        line=0 if probability is None else sum(probability < limit for limit in PROBABILITY_LIMITS),
        tip=_tip(text, size, probability, _at(sample, "mask_tokens", place)),
    )


def _tip(text: str, size: int | None, probability: float | None, kept: Any) -> str:
    words = [f"{_visible(text)}"]
    if probability is not None:
        words.append(f"p = {probability:.3g}")
    if size is not None:
        words.append("1 id: no choice" if size == 1 else f"{size} ids")
    if isinstance(kept, list) and kept and size is not None and size > 1:
        more = " \u2026" if size > len(kept) else ""
        words.append("kept: " + "  ".join(_visible(str(token)) for token in kept) + more)
    return " \u00b7 ".join(words)


def _visible(text: str, limit: int = 24) -> str:
    shown = text.replace("\n", "\u21b5").replace("\t", "\u21e5").replace(" ", "\u2423") or "\u2205"
    return shown if len(shown) <= limit else shown[:limit] + "\u2026"


def _list(sample: Mapping[str, Any], name: str) -> list[Any]:
    value = sample.get(name)
    return value if isinstance(value, list) else []


def _at(sample: Mapping[str, Any], name: str, place: int) -> Any:
    values = _list(sample, name)
    return values[place] if place < len(values) else None
