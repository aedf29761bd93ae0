"""Histograms that grow with what they have seen, and not with how much: exact for sizes, fine bins for shares."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, Real


def added(counts: Real[np.ndarray, " N"], more: Real[np.ndarray, " M"]) -> Real[np.ndarray, " K"]:
    """The sum of two arrays, as long as the longer: the shorter goes on with zeros."""
    long, short = (counts, more) if len(counts) >= len(more) else (more, counts)
    total = long.copy()
    total[: len(short)] += short
    return total


def quantile(counts: Int[np.ndarray, " N"], share: float) -> int:
    """The least value at or below which at least `share` of the values lie: value i was seen counts[i] times."""
    reached = np.cumsum(counts)
    return int(np.searchsorted(reached, share * reached[-1] - 1e-9))


class Shares:
    """How numbers in [0, 1] are spread: their least and sums are exact, quantiles to within 1 / `NUM_BINS`."""

    NUM_BINS = 2000

    def __init__(self) -> None:
        """None so far."""
        self._counts = np.zeros(self.NUM_BINS, np.int64)
        self.num = 0
        self.sum = 0.0
        self.least = 1.0

    def add(self, values: Float[np.ndarray, " N"]) -> None:
        """More of them."""
        if len(values) == 0:
            return
        # Those of exactly 1 lie in the last bin.
        bins = np.minimum((values * self.NUM_BINS).astype(np.int64), self.NUM_BINS - 1)
        self._counts += np.bincount(bins, minlength=self.NUM_BINS)
        self.num += len(values)
        self.sum += float(values.sum())
        self.least = min(self.least, float(values.min()))

    @property
    def mean(self) -> float:
        """Their mean; there must be one at least."""
        return self.sum / self.num

    def quantile(self, share: float) -> float:
        """The value that this share lies at or below, interpolated within its bin, and never below the least."""
        reached = np.cumsum(self._counts)
        place = int(np.searchsorted(reached, share * self.num - 1e-9))
        before = int(reached[place - 1]) if place else 0
        inside = min(max((share * self.num - before) / int(self._counts[place]), 0.0), 1.0)
        return max((place + inside) / self.NUM_BINS, self.least)

    def histogram(self, num_bins: int) -> Int[np.ndarray, " K"]:
        """Counts in wider bins of equal width, which must divide `NUM_BINS`."""
        return self._counts.reshape(num_bins, -1).sum(axis=1)
