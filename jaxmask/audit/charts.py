"""The pictures of an audit, as <svg> elements; colours come from the page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from jaxmask.svg import linear_scale, log_ticks, nice_ticks, place, short_number

WIDTH, HEIGHT = 360.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 12.0, 34.0
_END, _FLOOR = WIDTH - RIGHT, HEIGHT - BOTTOM
# Of the bars that lie.
_ROW, _NAME = 24.0, 118.0


def columns(
    title: str,
    axis: str,
    labels: Sequence[str],
    shares: Sequence[float],
    *,
    lines: Sequence[tuple[float, str]] = (),
    every: int = 1,
) -> str:
    """Shares as columns side by side.

    Args:
      title: for who cannot see it.
      axis: what stands along it.
      labels: of the columns, each `every`-th of which is written.
      shares: in [0, 1].
      lines: places among the columns, from 0 at the left edge to 1 at the right, to mark, each with its name.
      every: 1 writes all labels.
    """
    highest = max([*shares, 1e-9])
    y = linear_scale(0.0, highest * 1.05, _FLOOR, TOP)
    step = (_END - LEFT) / max(len(shares), 1)
    parts = _y_axis(nice_ticks(0.0, highest, 4), y, is_percent=True)
    for number, share in enumerate(shares):
        x, top = LEFT + step * number, float(y(share))
        tip = f"{labels[number]}: {share:.2%}"
        parts.append(_bar(x + 0.08 * step, top, 0.84 * step, _FLOOR - top, tip))
        if number % every == 0:
            parts.append(_text(x + step / 2, _FLOOR + 11, labels[number], "middle"))
    for at, name in lines:
        x = LEFT + (_END - LEFT) * at
        parts.append(_mark(x, x, TOP, _FLOOR) + _text(x - 3, TOP + 8, name, "end"))
    return _picture(title, [*parts, _text((LEFT + _END) / 2, HEIGHT - 6, axis, "middle")])


def steps(title: str, axis: str, labels: Sequence[str], shares: Sequence[float]) -> str:
    """Shares that add up from column to column, as a line over the same columns."""
    y = linear_scale(0.0, 1.0, _FLOOR, TOP)
    step = (_END - LEFT) / max(len(shares), 1)
    parts = _y_axis([0.0, 0.25, 0.5, 0.75, 1.0], y, is_percent=True)
    corners = [f"{place(LEFT)},{place(_FLOOR)}"]
    for number, total in enumerate(np.cumsum(shares).tolist()):
        x, top = LEFT + step * (number + 1), float(y(min(total, 1.0)))
        corners.append(f"{place(x)},{place(top)}")
        parts.append(_dot(x, top, f"up to {labels[number].split('-')[-1]}: {total:.2%}"))
        parts.append(_text(x, _FLOOR + 11, labels[number].split("-")[-1], "end"))
    parts.append(f'<polyline class="line" points="{" ".join(corners)}"/>')
    return _picture(title, [*parts, _text((LEFT + _END) / 2, HEIGHT - 6, axis, "middle")])


def curve(
    title: str, axis: str, x: Sequence[float], y: Sequence[float], *, is_share: bool = False, least: float | None = None
) -> str:
    """Values over positions as a line.

    Args:
      title: for who cannot see it.
      axis: what stands along it.
      x: positions, ascending.
      y: finite values, one at least.
      is_share: whether they are shares, shown in per cent.
      least: where the axis of values begins; 0 by default.
    """
    low = 0.0 if least is None else least
    high = max([*y, low + 1e-9])
    high += 0.05 * (high - low)
    up = linear_scale(low, high, _FLOOR, TOP)
    across = linear_scale(min(x), max([*x, min(x) + 1]), LEFT + 6, _END - 6)
    parts = _y_axis(nice_ticks(low, high, 4), up, is_percent=is_share)
    points = [(float(across(one)), float(up(other))) for one, other in zip(x, y, strict=True)]
    parts.append(f'<polyline class="line" points="{" ".join(f"{place(a)},{place(b)}" for a, b in points)}"/>')
    for (left, top), one, other in zip(points, x, y, strict=True):
        parts.append(_dot(left, top, f"{axis} {one:g}: " + (f"{other:.2%}" if is_share else f"{other:.4g}")))
    for tick in nice_ticks(min(x), max([*x, min(x) + 1]), 6):
        if tick % 1 == 0:
            parts.append(_text(float(across(tick)), _FLOOR + 11, short_number(tick), "middle"))
    return _picture(title, [*parts, _text((LEFT + _END) / 2, HEIGHT - 6, axis, "middle")])


def lying_bars(title: str, axis: str, names: Sequence[str], values: Sequence[float]) -> str:
    """Positive values as bars from the left, on a logarithmic axis, each with its number."""
    low, high = math.log10(min(values)), math.log10(max(values))
    low = float(math.floor(low - 0.3))
    high = max(high + 0.1, low + 1.0)
    x = linear_scale(low, high, _NAME, WIDTH - 44.0)
    height = TOP + _ROW * len(names) + BOTTOM
    floor = height - BOTTOM
    parts = []
    for tick in log_ticks(low, high):
        at = float(x(math.log10(tick)))
        parts.append(_line("grid", at, at, TOP, floor) + _text(at, floor + 11, short_number(tick), "middle"))
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        top, end = TOP + _ROW * number, float(x(math.log10(value)))
        parts.append(_bar(_NAME, top + 4, end - _NAME, _ROW - 8, f"{name}: {value:,.1f}"))
        parts.append(_text(_NAME - 6, top + _ROW / 2 + 3, name, "end"))
        parts.append(_text(end + 4, top + _ROW / 2 + 3, _figure(value), "start"))
    middle = _text((_NAME + WIDTH - 44.0) / 2, height - 6, axis, "middle")
    return _picture(title, [*parts, middle], height)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _picture(title: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    name = html.escape(title)
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def _y_axis(ticks: Sequence[float], y: object, *, is_percent: bool) -> list[str]:
    assert callable(y)
    labels = [f"{short_number(round(100 * tick, 6))} %" if is_percent else short_number(tick) for tick in ticks]
    return [
        _line("grid", LEFT, _END, float(y(tick)), float(y(tick))) + _text(LEFT - 5, float(y(tick)) + 3, label, "end")
        for tick, label in zip(ticks, labels, strict=True)
    ]


def _bar(x: float, y: float, width: float, height: float, tip: str) -> str:
    box = f'x="{place(x)}" y="{place(y)}" width="{place(max(width, 0.0))}" height="{place(max(height, 0.0))}"'
    return f'<rect class="bar" {box}><title>{html.escape(tip)}</title></rect>'


def _dot(x: float, y: float, tip: str) -> str:
    return f'<circle class="dot" cx="{place(x)}" cy="{place(y)}" r="2.6"><title>{html.escape(tip)}</title></circle>'


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{place(x1)}" x2="{place(x2)}" y1="{place(y1)}" y2="{place(y2)}"/>'


def _mark(x1: float, x2: float, y1: float, y2: float) -> str:
    return _line("mark", x1, x2, y1, y2)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{place(x)}" y="{place(y)}" text-anchor="{anchor}">{html.escape(text)}</text>'
