"""Requests to per-row arrays, on the host: the checks that need the vocabulary, neutral values, padding.

`least` maps a field to the sizes that its array must at least have past the row axis: () for one value per row, (N,)
for a list, (M, L) for M words of L ids. A field named there is made even where no row uses it, with neutral values.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped, UInt

from jaxmask.params import SamplingParams

Least = Mapping[str, tuple[int, ...]]

# Settings that look back at the tokens which the engine itself put out, each with the value that turns it off.
LOOKS_BACK: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "bad_words": (),
    "min_tokens": 0,
}
_NO_LIMIT = np.iinfo(np.int32).max
# Of ids that are none, in an error.
_MOST_SHOWN = 16


def as_requests(params: SamplingParams | Sequence[SamplingParams]) -> list[SamplingParams]:
    """The requests as a list; raises ValueError unless there is at least one, and nothing else."""
    if isinstance(params, SamplingParams):
        return [params]
    try:
        requests = list(params)
    except TypeError as error:
        raise ValueError(f"params must be SamplingParams or a sequence of them, got {params!r}.") from error
    if not requests:
        raise ValueError("params must hold at least one SamplingParams, got none.")
    for index, request in enumerate(requests):
        if not isinstance(request, SamplingParams):
            raise ValueError(f"params must hold nothing but SamplingParams, got {request!r} at index {index}.")
    return requests


def check_request(request: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for an id outside [0, V) or a bad word given as text."""
    check_token_ids("stop_token_ids", request.stop_token_ids or (), vocab_size)
    check_token_ids("logit_bias", tuple(request.logit_bias or ()), vocab_size)
    check_token_ids("allowed_token_ids", request.allowed_token_ids or (), vocab_size)
    for word in request.bad_words or ():
        if isinstance(word, str):
            raise ValueError(f"bad_words given as text need a tokenizer; pass token id lists here, got {word!r}.")
        check_token_ids("bad_words", word, vocab_size)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError, with vLLM's text, unless every id is in [0, V)."""
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        more = f" and {len(outside) - _MOST_SHOWN} more" if len(outside) > _MOST_SHOWN else ""
        raise ValueError(
            f"token_id(s) {outside[:_MOST_SHOWN]}{more} in {field} contain out-of-vocab token ids. Vocabulary size: "
            f"{vocab_size}"
        )


def check_bound(request: SamplingParams, support_bound: int) -> None:
    """Raises ValueError unless the request's support, where it returns one, surely fits the bound."""
    if request.return_sampling_mask is False:
        return
    if request.is_greedy or not 1 <= request.top_k <= support_bound:
        raise ValueError(
            f"top_k must be in [1, {support_bound}] and temperature > 0 where supports are bounded by "
            f"support_bound={support_bound}, got top_k={request.top_k}, temperature={request.temperature}."
        )


def filters(rows: Sequence[SamplingParams], vocab_size: int) -> dict[str, Array]:
    """Temperature, min-p, top-k and top-p of each row; those that are off are neutral."""
    # Greedy rows are not filtered (as in vLLM): their log-probability is over the whole edited vocabulary.
    top_k = [vocab_size if r.is_greedy or r.top_k <= 0 else min(r.top_k, vocab_size) for r in rows]
    return {
        "temperature": _column([r.temperature for r in rows], np.float32),
        "min_p": _column([0.0 if r.is_greedy else _least_normal(r.min_p) for r in rows], np.float32),
        "top_k": _column(top_k, np.int32),
        "top_p": _column([1.0 if r.is_greedy else r.top_p for r in rows], np.float32),
    }


def ends(rows: Sequence[SamplingParams], vocab_size: int, eos: tuple[int, ...], least: Least) -> dict[str, Any]:
    """What ends each row, and what may not end it before its min_tokens."""
    stops = [tuple(r.stop_token_ids or ()) + (() if r.ignore_eos else eos) for r in rows]
    withheld = [tuple(r.stop_token_ids or ()) + eos if r.min_tokens else () for r in rows]
    min_tokens = _optional("min_tokens", [r.min_tokens for r in rows], 0, np.int32, least)
    return {
        "max_tokens": _column([min(r.max_tokens or _NO_LIMIT, _NO_LIMIT) for r in rows], np.int32),
        "stop_token_ids": _padded("stop_token_ids", stops, vocab_size, np.int32, least),
        "min_tokens": min_tokens,
        "withheld_token_ids": None
        if min_tokens is None
        else _padded("withheld_token_ids", withheld, vocab_size, np.int32, least),
    }


def edits(rows: Sequence[SamplingParams], vocab_size: int, least: Least) -> dict[str, Any]:
    """The arrays of the edits, None where they are neither used nor named in `least`."""
    biases = [r.logit_bias or {} for r in rows]
    allowed = [r.allowed_token_ids or () for r in rows]
    words = [[w for w in r.bad_words or () if not isinstance(w, str)] for r in rows]
    made: dict[str, Any] = dict.fromkeys(("allowed_token_ids", "logit_bias_ids", "logit_bias_values", "bad_words"))
    if any(allowed) or "allowed_token_ids" in least:
        made["allowed_token_ids"] = _padded("allowed_token_ids", allowed, vocab_size, np.int32, least)
    if any(biases) or "logit_bias_ids" in least:
        made["logit_bias_ids"] = _padded("logit_bias_ids", [tuple(b) for b in biases], vocab_size, np.int32, least)
        values = [tuple(b.values()) for b in biases]
        made["logit_bias_values"] = _padded("logit_bias_values", values, 0.0, np.float32, least)
    if any(words) or "bad_words" in least:
        made["bad_words"] = _padded_words(words, vocab_size, least.get("bad_words", (1, 1)))
    for field, neutral in (("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0)):
        made[field] = _optional(field, [getattr(r, field) for r in rows], neutral, np.float32, least)
    return made


def returns_support(rows: Sequence[SamplingParams], least: Least) -> Array | None:
    """Which rows return their support; None where all do and `least` does not name it."""
    return _optional("returns_support", [r.return_sampling_mask is not False for r in rows], True, np.bool_, least)


def seeds(requests: Sequence[SamplingParams]) -> UInt[Array, "B 2"]:
    """Low and high words: n consecutive seeds per request, the first one drawn here where there is none."""
    rows = []
    for request in requests:
        first = secrets.randbits(64) if request.seed is None else request.seed
        rows += [(first + child) % 2**64 for child in range(request.n)]
    return jnp.asarray(np.array([(seed & 0xFFFFFFFF, seed >> 32) for seed in rows], np.uint32))


def _bucket(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _least_normal(value: float) -> float:
    """Positive values at least at the smallest normal float32: XLA takes smaller ones for 0, which would mean off."""
    return max(value, float(np.finfo(np.float32).tiny)) if value > 0 else value


def _column(values: Sequence[float | int], dtype: type) -> Array:
    return jnp.asarray(np.array(values, dtype))


def _optional(
    field: str, values: Sequence[float | int], neutral: float | int, dtype: type, least: Least
) -> Array | None:
    is_needed = field in least or any(value != neutral for value in values)
    return _column(values, dtype) if is_needed else None


def _padded(
    field: str, lists: Sequence[Sequence[float | int]], fill: float | int, dtype: type, least: Least
) -> Shaped[Array, "B N"]:
    (at_least,) = least.get(field, (1,))
    width = max(at_least, _bucket(max(len(values) for values in lists)))
    padded: np.ndarray = np.full((len(lists), width), fill, dtype)
    for row, values in zip(padded, lists, strict=True):
        row[: len(values)] = values
    return jnp.asarray(padded)


def _padded_words(lists: Sequence[Sequence[Sequence[int]]], fill: int, least: tuple[int, ...]) -> Int[Array, "B M L"]:
    num_words = max(least[0], _bucket(max(len(words) for words in lists)))
    length = max(least[1], _bucket(max((len(word) for words in lists for word in words), default=1)))
    padded = np.full((len(lists), num_words, length), fill, np.int32)
    for row, words in zip(padded, lists, strict=True):
        for slot, word in zip(row, words, strict=False):
            slot[length - len(word) :] = word
    return jnp.asarray(padded)
