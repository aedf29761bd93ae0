"""How the notebooks look: the style of their figures, and tokens in the colour of their support's size."""

from __future__ import annotations

import html
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY, LIGHT = "#1d1c1a", "#8c8780", "#d5d0c7"
BLUE, ORANGE, GREEN, PLUM = "#2563eb", "#d97706", "#059669", "#8a2560"

# The most ids of each band, what it is called, and its ground: from pale to dark, as on the server's page.
BANDS = (
    (1, "1 id", "#ffffff"),
    (2, "2", "#fdf0b8"),
    (8, "3 to 8", "#fbcf7d"),
    (32, "9 to 32", "#f29b6a"),
    (np.inf, "33 and more", "#d0699d"),
)
_BOX = (
    "background:#fff;color:#1d1c1a;border:1px solid #dedad2;border-radius:8px;padding:10px 14px;margin:6px 0;"
    "max-width:860px;font:15px/1.75 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
)
_QUIET = "color:#66625b;font-size:13px"


def use_style() -> None:
    """Plain axes, quiet grids, titles at the left; white grounds, so that dark themes change nothing."""
    plt.rcParams.update(
        {
            "figure.facecolor": "white",
            "figure.dpi": 90,
            "figure.constrained_layout.use": True,
            "font.size": 10.5,
            "text.color": INK,
            "axes.edgecolor": GREY,
            "axes.labelcolor": INK,
            "axes.titlelocation": "left",
            "axes.titlesize": 11.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, PLUM]),
            "grid.color": "#ecebe7",
            "xtick.color": GREY,
            "ytick.color": GREY,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
        }
    )


def panels(
    num_columns: int, height: float = 3.0, *, num_rows: int = 1, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of the notebooks' width, and its axes in reading order."""
    figure, axes = plt.subplots(num_rows, num_columns, figsize=(10, height * num_rows), sharey=share_y, squeeze=False)
    return figure, list(axes.flat)


def size_bars(axes: Axes, counts: Sequence[int] | np.ndarray, *, color: str = BLUE) -> None:
    """Shares of tokens by support size, in bars for 1, 2, 3 to 4, 5 to 8, ... ids, the last for 65 and more."""
    names = ["1", "2", "3\u20134", "5\u20138", "9\u201316", "17\u201332", "33\u201364", "65+"]
    buckets = np.minimum(np.ceil(np.log2(np.asarray(counts))).astype(int), len(names) - 1)
    shares = np.bincount(buckets) / len(buckets)
    bars = axes.bar(names[: len(shares)], shares, color=color)
    axes.bar_label(bars, [f"{share:.0%}" if share >= 0.005 else "" for share in shares], color=INK, padding=2)
    axes.set(xlabel="ids in the support", ylabel="share of tokens", ylim=(0, 1.15 * shares.max()))
    axes.grid(False, axis="x")


def coloured(
    pieces: Sequence[str], counts: Sequence[int], tips: Sequence[str] | None = None, *, title: str = ""
) -> str:
    """HTML of one text, each piece on the ground of its support's size; a tip shows where a mouse rests."""
    tips = [f"{count} ids" for count in counts] if tips is None else tips
    spans = (_span(*one) for one in zip(pieces, counts, tips, strict=True))
    head = f'<div style="{_QUIET}">{html.escape(title)}</div>' if title else ""
    return f'<div style="{_BOX}">{head}{"".join(spans)}</div>'


def legend() -> str:
    """HTML that says what the colours stand for."""
    parts = (
        f'<span style="background:{ground};border:1px solid #dedad2;border-radius:3px;padding:1px 7px;'
        f'color:{INK};margin-right:10px">{name}</span>'
        for _, name, ground in BANDS
    )
    return f'<div style="{_QUIET};margin:6px 0">ids in the support: &nbsp;{"".join(parts)}</div>'


def page(*parts: str) -> HTML:
    """Pieces of HTML as one output."""
    return HTML("".join(parts))


def table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """HTML of a small table; texts at the left, numbers at the right."""
    cell = "padding:3px 12px;border-bottom:1px solid #ecebe7;vertical-align:top;text-align:"
    head = "".join(f'<th style="{cell}left;font-weight:600">{html.escape(name)}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f'<td style="{cell}{_side(value)}">{html.escape(str(value))}</td>' for value in row) + "</tr>"
        for row in rows
    )
    inside = f'<table style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'
    return f'<div style="{_BOX};font-size:14px">{inside}</div>'


def visible(text: str) -> str:
    """A token's text with its spaces and newlines to be seen."""
    return text.replace("\n", "\u21b5").replace(" ", "\u2423") or "\u2205"


def _span(piece: str, count: int, tip: str) -> str:
    ground = next(ground for most, _, ground in BANDS if count <= most)
    shown = html.escape(piece).replace("\n", "\u21b5<br>")
    style = f"background:{ground};border-radius:3px;padding:2px 1px;white-space:pre-wrap"
    return f'<span style="{style}" title="{html.escape(tip)}">{shown}</span>'


def _side(value: object) -> str:
    return "right" if isinstance(value, (int, float)) else "left"
