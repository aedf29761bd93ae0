"""What charts drawn as SVG text have in common: scales, round ticks, short numbers. Colours are the page's matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# From a number, or an array of them, to places in the picture.
Scale = Callable[[Any], Any]


def linear_scale(low: float, high: float, start: float, end: float) -> Scale:
    """The scale that takes `low` to `start` and `high`, which is another number, to `end`."""
    return lambda values: start + (np.asarray(values) - low) / (high - low) * (end - start)


def nice_ticks(low: float, high: float, num: int) -> list[float]:
    """About `num` round values from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [float(f"{number * step:.12g}") for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round values from 10^low to 10^high: powers of ten, or what lies between where there are fewer than two."""
    powers = range(math.ceil(low), math.floor(high) + 1)
    if len(powers) >= 2:
        return [10.0**power for power in powers[:: math.ceil(len(powers) / 5)]]
    found = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high)) for factor in (1, 2, 5)]
    found = [tick for tick in found if low <= math.log10(tick) <= high]
    return found if len(found) > 2 else nice_ticks(10.0**low, 10.0**high, 4)


def short_number(value: float) -> str:
    """A number as a tick's label: 0.05, 20k, 3e-07 as "3e-7"."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value / 1000:g}k" if abs(value) >= 1e4 else f"{value:.8g}"


def place(value: float) -> str:
    """A place in the picture, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")
