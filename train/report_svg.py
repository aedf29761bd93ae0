"""Charts as SVG text that a page holds inline: colours by CSS classes, so that light and dark come from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from jaxmask.svg import Scale, linear_scale, log_ticks, nice_ticks, place, short_number
from train.report_series import Chart, Line

WIDTH, HEIGHT = 300.0, 170.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 8.0, 22.0
# A logarithmic axis shows nothing below: the 0 of a ratio that is 1 to the last bit lies on the least other value.
LOG_FLOOR = 1e-16
NUM_SHADES = 20
# Where the plot lies in the picture, for scripts that read it.
PLOT = {"width": WIDTH, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}


def curves(chart: Chart) -> Markup:
    """A chart as an <svg> element. A logarithmic one without a positive value is drawn on a plain axis."""
    drawn = [side for line in chart.lines for side in (line.y, line.raw, line.low, line.high) if side is not None]
    values = np.concatenate([*drawn, [] if chart.reference is None else [chart.reference]])
    values = values[np.isfinite(values)]
    positive = values[values > LOG_FLOOR]
    floor = float(positive.min()) if chart.is_log and len(positive) else None
    across, up = _across(np.concatenate([line.x for line in chart.lines])), _up(values, floor)
    x, y_linear = linear_scale(*across, LEFT, WIDTH - RIGHT), linear_scale(*up, HEIGHT - BOTTOM, TOP)

    def y(values: Any) -> Any:
        return y_linear(np.asarray(values) if floor is None else np.log10(np.maximum(values, floor)))

    parts = _y_axis(y_linear, up, floor, chart.reference) + _x_axis(x, across)
    if chart.reference is not None:
        at = place(float(y(chart.reference)))
        parts.append(f'<line class="ref" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{at}" y2="{at}"/>')
    parts += [_line(line, number, x, y) for number, line in enumerate(chart.lines)]
    logarithm = "" if floor is None else ' data-log=""'
    scale = f' data-scale="{across[0]:g} {across[1]:g} {up[0]:.9g} {up[1]:.9g}"{logarithm}'
    return _svg(chart.title, parts, scale)


def heat_map(title: str, steps: np.ndarray, shares: np.ndarray, labels: Sequence[str]) -> Markup:
    """Shares [N, K] over N ascending iterations and K labelled buckets, the darker the larger.

    Args:
      title: for who cannot see it.
      steps: where each column stands.
      shares: in [0, 1].
      labels: of the buckets, from the bottom up.
    """
    num, num_buckets = shares.shape
    cell = (HEIGHT - TOP - BOTTOM) / num_buckets
    edges = LEFT + (WIDTH - LEFT - RIGHT) * np.arange(num + 1) / num
    # By the square root, so that the few wide supports can be seen at all.
    shades = np.ceil(np.sqrt(np.clip(np.nan_to_num(shares), 0, 1)) * NUM_SHADES).astype(int)
    parts = []
    for shade in range(1, NUM_SHADES + 1):
        cells = (
            f"M{place(edges[column])} {place(HEIGHT - BOTTOM - cell * (bucket + 1))}"
            f"h{place(edges[column + 1] - edges[column])}v{place(cell)}H{place(edges[column])}z"
            for column, bucket in np.argwhere(shades == shade)
        )
        if path := "".join(cells):
            parts.append(f'<path class="heat" fill-opacity="{shade / NUM_SHADES:.2f}" d="{path}"/>')
    for bucket, label in enumerate(labels):
        at = HEIGHT - BOTTOM - cell * (bucket + 0.5) + 3
        parts.append(f'<text x="{LEFT - 5:g}" y="{place(at)}" text-anchor="end">{escape(label)}</text>')
    across = _across(steps)
    parts += _x_axis(linear_scale(*across, LEFT, WIDTH - RIGHT), across)
    return _svg(title, parts)


def _svg(title: str, parts: Sequence[str], scale: str = "") -> Markup:
    body, box = "".join(parts), f"0 0 {WIDTH:g} {HEIGHT:g}"
    # All text in it is made of numbers, or escaped above.
    return Markup(f'<svg viewBox="{box}" role="img" aria-label="{escape(title)}"{scale}>{body}</svg>')


def _across(steps: np.ndarray) -> tuple[float, float]:
    return float(steps.min()), float(max(steps.max(), steps.min() + 1))


def _up(values: np.ndarray, floor: float | None) -> tuple[float, float]:
    """Limits of the values' axis; of their powers of ten where there is a floor."""
    if len(values) == 0:
        return 0.0, 1.0
    if floor is not None:
        values = np.log10(np.maximum(values, floor))
    low, high = float(values.min()), float(values.max())
    if floor is None and 0 < low < 0.5 * high:
        low = 0.0
    # Values that differ by rounding alone lie on one line, not all over the picture.
    if high - low <= 1e-7 * (max(abs(high), abs(low)) if floor is None else 1):
        room = 0.5 if floor is not None else max(0.05 * abs(high), 1e-12)
        low, high = (0.0, 1.0) if high == 0 and floor is None else (low - room, high + room)
    margin = 0.04 * (high - low)
    return (low if low == 0 else low - margin), high + margin


def _y_axis(y: Scale, up: tuple[float, float], floor: float | None, reference: float | None) -> list[str]:
    parts = []
    for tick in nice_ticks(*up, 5) if floor is None else log_ticks(*up):
        at = float(y(tick if floor is None else math.log10(tick)))
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{place(at)}" y2="{place(at)}"/>')
        parts.append(f'<text x="{LEFT - 5:g}" y="{place(at + 3)}" text-anchor="end">{_label(tick, reference)}</text>')
    return parts


def _x_axis(x: Scale, across: tuple[float, float]) -> list[str]:
    return [
        f'<text x="{place(float(x(tick)))}" y="{HEIGHT - 6:g}" text-anchor="middle">{short_number(tick)}</text>'
        for tick in nice_ticks(*across, 6)
        if tick % 1 == 0
    ]


def _line(line: Line, number: int, x: Scale, y: Scale) -> str:
    across, parts = x(line.x), []
    if line.low is not None and line.high is not None:
        for run in _finite_runs(line.low + line.high):
            edge = [*zip(across[run], y(line.high[run]), strict=True)]
            edge += [*zip(across[run], y(line.low[run]), strict=True)][::-1]
            corners = " ".join(f"{place(a)},{place(b)}" for a, b in edge)
            parts.append(f'<polygon class="band c{number % 5}" points="{corners}"/>')
    if line.raw is not None:
        parts += [
            f'<polyline class="raw c{number % 5}" points="{" ".join(points)}"/>'
            for points in _points(across, y(line.raw))
        ]
    for points in _points(across, y(line.y)):
        label = escape(line.label)
        parts.append(f'<polyline class="line c{number % 5}" data-label="{label}" points="{" ".join(points)}"/>')
        if line.is_sparse or len(points) == 1:
            circle = '<circle class="dot c{}" cx="{}" cy="{}" r="2.5"/>'
            parts += [circle.format(number % 5, *point.split(",")) for point in points]
    return "".join(parts)


def _points(across: np.ndarray, heights: np.ndarray) -> list[list[str]]:
    """The corners of each stretch of finite values."""
    pairs = [f"{place(a)},{place(b)}" for a, b in zip(across, heights, strict=True)]
    return [pairs[run] for run in _finite_runs(heights)]


def _finite_runs(values: np.ndarray) -> list[slice]:
    """The stretches of consecutive finite values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], np.isfinite(values), [False]]).astype(np.int8)))
    return [slice(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _label(tick: float, reference: float | None) -> str:
    """The tick, as a difference where it nearly is the reference: 1+1e-7."""
    if reference is None or not 0 < abs(tick - reference) < 1e-3 * abs(reference):
        return short_number(tick)
    sign = "+" if tick > reference else "\u2212"
    return f"{short_number(reference)}{sign}{short_number(float(f'{abs(tick - reference):.3g}'))}"
