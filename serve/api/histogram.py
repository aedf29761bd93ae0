"""Counts of values by size, as Prometheus wants them, that cost little where many values come at once."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Integer

# NumPy's search lets other threads run; waiting for the next turn takes longer than to sort so many values one by one.
_FEW = 64


class Histogram:
    """How many values were at most each of some bounds."""

    def __init__(self, bounds: Sequence[float | int]):
        """Of no values; bounds ascend."""
        self._bounds = [float(bound) for bound in bounds]
        self._counts: Int[np.ndarray, " N"] = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0

    def add(self, value: float | int, times: int = 1) -> None:
        """One value, or the same several times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._total += value * times

    def add_all(self, values: Integer[np.ndarray, " N"]) -> None:
        """Many values."""
        if len(values) <= _FEW:
            for value in values.tolist():
                self.add(value)
            return
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._total += float(values.sum())

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._total

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """For each bound, the last being "+Inf", how many values were at most that."""
        names = [f"{bound:g}" for bound in self._bounds] + ["+Inf"]
        return list(zip(names, np.cumsum(self._counts).astype(float).tolist(), strict=True))
