"""What the logits of a file say of its tokens: their log-probabilities, and what the supports kept.

In float64, over some rows of the vocabulary at a time.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmask.params import MIN_TEMPERATURE

# Logits that are taken to float64 at a time: 8 MiB of them.
_CHUNK = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class LogitValues:
    """Of each token; NaN where there is no support to go by, and where a temperature is needed and not known.

    Attributes:
      kept: log-probability of the token over its support, at the row's temperature.
      full: the same over the whole vocabulary.
      kept_at_one: the same as `kept` at temperature 1.
      full_at_one: the same as `full` at temperature 1.
      kept_mass: the probability that the vocabulary's softmax, at the row's temperature, gives to the support.
      num_impossible: ids of the support whose logit is -inf, +inf or NaN.
      excess: largest finite logit outside the support minus the least inside; -inf where nothing is outside.
      largest_left_out: the id of it.
    """

    kept: Float[np.ndarray, " N"]
    full: Float[np.ndarray, " N"]
    kept_at_one: Float[np.ndarray, " N"]
    full_at_one: Float[np.ndarray, " N"]
    kept_mass: Float[np.ndarray, " N"]
    num_impossible: Int[np.ndarray, " N"]
    excess: Float[np.ndarray, " N"]
    largest_left_out: Int[np.ndarray, " N"]


def logit_values(
    logits: Float[np.ndarray, "N V"],
    token_ids: Int[np.ndarray, " N"],
    sizes: Int[np.ndarray, " N"],
    support_ids: Int[np.ndarray, " K"],
    temperature: Float[np.ndarray, " N"],
) -> LogitValues:
    """The values of tokens and supports.

    Args:
      logits: before temperature and filters.
      token_ids: the token of each; outside [0, V) gives NaN.
      sizes: of the supports; none where below 1, or where an id lies outside [0, V).
      support_ids: one support after another.
      temperature: of each; NaN: not known. Raised to the least that samplers divide by.
    """
    N, V = logits.shape
    starts = np.cumsum(np.maximum(sizes, 0)) - np.maximum(sizes, 0)
    step = max(_CHUNK // V, 1)
    parts = []
    for start in range(0, max(N, 1), step):
        end = min(start + step, N)
        tokens = slice(start, end)
        ids = slice(int(starts[start]) if N else 0, int(starts[end]) if end < N else len(support_ids))
        heat = np.where(temperature[tokens] > 0, np.maximum(temperature[tokens], MIN_TEMPERATURE), np.nan)
        parts.append(_values(logits[tokens], token_ids[tokens], sizes[tokens], support_ids[ids], heat))
    names = [field.name for field in dataclasses.fields(LogitValues)]
    return LogitValues(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _values(
    logits: Float[np.ndarray, "N V"],
    token_ids: Int[np.ndarray, " N"],
    sizes: Int[np.ndarray, " N"],
    support_ids: Int[np.ndarray, " K"],
    temperature: Float[np.ndarray, " N"],
) -> LogitValues:
    N, V = logits.shape
    owner = np.repeat(np.arange(N), np.maximum(sizes, 0))
    is_inside = (support_ids >= 0) & (support_ids < V)
    is_bad = np.bincount(owner[~is_inside], minlength=N) > 0
    keep = np.zeros((N, V), np.bool_)
    keep[owner[is_inside], support_ids[is_inside]] = True

    z = logits.astype(np.float64)
    num_impossible = (keep & ~np.isfinite(z)).sum(axis=1)
    z = np.where(np.isfinite(z), z, -np.inf)
    inside, outside = np.where(keep, z, np.inf), np.where(keep, -np.inf, z)
    largest, least = outside.max(axis=1), inside.min(axis=1)

    is_token = (token_ids >= 0) & (token_ids < V)
    own = np.where(is_token, z[np.arange(N), np.where(is_token, token_ids, 0)], np.nan)
    is_usable = (sizes > 0) & ~is_bad
    kept, full = (_log_sum(rows, temperature) for rows in (np.where(keep, z, -np.inf), z))
    ones = np.ones(N)
    kept_at_one, full_at_one = (_log_sum(rows, ones) for rows in (np.where(keep, z, -np.inf), z))

    def usable(values: np.ndarray) -> np.ndarray:
        return np.where(is_usable & np.isfinite(values), values, np.nan)

    # Infinities and NaN of the logits make more of them, and they are what is looked for.
    with np.errstate(invalid="ignore"):
        excess = np.where(np.isfinite(largest) & np.isfinite(least), largest - least, -np.inf)
        return LogitValues(
            usable(own / temperature - kept),
            usable(own / temperature - full),
            usable(own - kept_at_one),
            usable(own - full_at_one),
            usable(np.exp(kept - full)),
            np.where(is_usable, num_impossible, 0),
            np.where(is_usable, excess, -np.inf),
            outside.argmax(axis=1),
        )


def _log_sum(z: Float[np.ndarray, "N V"], temperature: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """log sum exp(z / T) of each row; -inf of a row of -inf alone."""
    top = z.max(axis=1)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return top / temperature + np.log(np.exp((z - top[:, None]) / temperature[:, None]).sum(axis=1))


def same(values: Float[np.ndarray, " N"], others: Float[np.ndarray, " N"], tolerance: float) -> Bool[np.ndarray, " N"]:
    """Which values are equal to within the tolerance, absolute below 1 and relative above; NaN equals nothing."""
    return np.abs(values - others) <= tolerance * np.maximum(1.0, np.abs(others))
