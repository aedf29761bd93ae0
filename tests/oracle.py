"""The contract in float64 NumPy with plain sorting, independent of the implementation.

A row's tokens are ordered by (edited float32 logit descending, id ascending); min-p, top-k and top-p keep prefixes.
Masses are float64. Where float32 rounding may legitimately move a boundary, a row has several acceptable lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tolerances

from jaxmask import SamplingParams


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the contract says of each row.

    Attributes:
      order: ids in canonical order.
      z: tempered logits over ids, the largest 0; -inf where the id cannot be drawn.
      length: tokens kept in exact arithmetic.
      low: fewest tokens that float32 rounding may keep.
      high: most tokens that float32 rounding may keep.
    """

    order: np.ndarray
    z: np.ndarray
    length: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def is_exact(self) -> np.ndarray:
        """Rows with no boundary on a rounding edge."""
        return self.low == self.high

    def keep(self, length: np.ndarray | None = None) -> np.ndarray:
        """The kept set over ids, for the exact lengths or for given ones."""
        length = self.length if length is None else length
        rank = np.empty_like(self.order)
        np.put_along_axis(rank, self.order, np.arange(self.order.shape[1])[None, :], axis=1)
        return rank < length[:, None]


def finite_or_excluded(logits: np.ndarray) -> np.ndarray:
    x = np.asarray(logits, np.float32)
    return np.where(np.isfinite(x), x, np.float32(-np.inf))


def edit(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> np.ndarray:
    """Edited float32 logits of one row after `output` was generated."""
    x = finite_or_excluded(logits)
    if params.allowed_token_ids:
        is_allowed = np.zeros(len(x), bool)
        is_allowed[list(params.allowed_token_ids)] = True
        x[~is_allowed] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += np.float32(bias)
    if len(output) < params.min_tokens:
        x[[*eos, *(params.stop_token_ids or ())]] = -np.inf
    for token_id in set(prompt) | set(output):
        penalty = np.float32(params.repetition_penalty)
        x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
    for token_id in set(output):
        x[token_id] -= np.float32(params.frequency_penalty) * np.float32(list(output).count(token_id))
    for token_id in set(output):
        x[token_id] -= np.float32(params.presence_penalty)
    for word in params.bad_words or ():
        head = tuple(word[:-1])
        if tuple(output[len(output) - len(head) :]) == head and len(output) >= len(head):
            x[word[-1]] = -np.inf
    return finite_or_excluded(x)


def truth(edited: np.ndarray, params: Sequence[SamplingParams]) -> Truth:
    """The filters on edited logits [B, V], one `SamplingParams` per row."""
    edited = finite_or_excluded(edited)
    # Settings enter as the float32 numbers the rows are given.
    temperature = np.array([p.temperature or 1.0 for p in params], np.float32).astype(np.float64)
    is_greedy = np.array([p.temperature == 0 for p in params])
    min_p = np.where(is_greedy, 0.0, np.array([p.min_p for p in params], np.float32).astype(np.float64))
    top_p = np.where(is_greedy, 1.0, np.array([p.top_p for p in params], np.float32).astype(np.float64))
    V = edited.shape[1]
    top_k = np.array([V if p.temperature == 0 or p.top_k <= 0 else min(p.top_k, V) for p in params])

    order = np.argsort(-edited, axis=1, kind="stable")
    x = np.take_along_axis(edited, order, axis=1).astype(np.float64)
    top = np.where(np.isfinite(x[:, :1]), x[:, :1], 0.0)
    z = (x - top) / temperature[:, None]
    with np.errstate(divide="ignore"):
        floor = np.log(min_p)[:, None]
    shifts = (0, tolerances.EDGE, -tolerances.EDGE)
    after_min_p = [(np.isfinite(z) & (z >= floor + shift)).sum(axis=1) for shift in shifts]
    kept, fewest, most = (np.minimum(length, top_k) for length in after_min_p)
    # The largest z is 0, so with min_p <= 1 the first token survives whatever rounding does.
    fewest = np.maximum(fewest, np.minimum(kept, 1))
    length = _nucleus(z, kept, top_p, 1.0)
    low = _nucleus(z, fewest, top_p, 1 - tolerances.EDGE)
    high = _nucleus(z, most, top_p, 1 + tolerances.EDGE)
    over_ids = np.empty_like(z)
    np.put_along_axis(over_ids, order, z, axis=1)
    return Truth(order, over_ids, length, low, high)


def _nucleus(z: np.ndarray, length: np.ndarray, top_p: np.ndarray, slack: float) -> np.ndarray:
    """Length of the shortest prefix whose mass reaches `slack` top_p of the first `length`; all of them for top_p 1."""
    is_kept = np.arange(z.shape[1])[None, :] < length[:, None]
    mass = np.cumsum(np.where(is_kept, np.exp(z), 0.0), axis=1)
    reaches = mass >= (slack * top_p)[:, None] * mass[:, -1:]
    nucleus = np.where(reaches.any(axis=1), reaches.argmax(axis=1) + 1, length)
    return np.where(top_p < 1, np.minimum(nucleus, length), length)


def log_probs(values: np.ndarray, keep: np.ndarray | None = None, temperature: float | np.ndarray = 1.0) -> np.ndarray:
    """Log-softmax of values / temperature over the kept entries of the last axis, float64; -inf elsewhere."""
    values = np.asarray(values, np.float64)
    keep = np.isfinite(values) if keep is None else keep
    temperature = np.asarray(temperature, np.float64)
    z = np.where(keep, values, -np.inf) / (temperature[..., None] if temperature.ndim else temperature)
    top = z.max(axis=-1, keepdims=True)
    z = z - np.where(np.isfinite(top), top, 0.0)
    mass = np.exp(z).sum(axis=-1, keepdims=True)
    return np.where(keep, z - np.log(np.where(mass > 0, mass, 1.0)), -np.inf)


def reported(mode: str, raw: np.ndarray, edited: np.ndarray, keep: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Values over the vocabulary of one row under a log-prob mode."""
    raw, temperature = finite_or_excluded(raw).astype(np.float64), params.temperature or 1.0
    if mode == "raw_logits":
        return raw
    if mode == "raw_logprobs":
        return log_probs(raw)
    if mode == "processed_logits":
        return np.where(keep, edited.astype(np.float64) / temperature, -np.inf)
    return log_probs(edited, keep, temperature)


def entropy(values: np.ndarray, keep: np.ndarray, temperature: float | np.ndarray = 1.0) -> np.ndarray:
    """In nats, of the softmax over the kept entries."""
    lp = log_probs(values, keep, temperature)
    return -np.where(keep, np.exp(lp) * np.where(keep, lp, 0.0), 0.0).sum(axis=-1)
