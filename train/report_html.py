"""report.html: a run on one page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from models.files import write_whole
from train.report import read_metrics
from train.report_samples import PROBABILITY_LIMITS, SIZE_LIMITS, read_samples, shown_samples
from train.report_series import bin_starts, charts, column
from train.report_svg import PLOT, curves, heat_map

MAX_COLUMNS = 60
# Iterations that a headline figure is the mean of.
NUM_LAST = 10


def write_report(folder: Path) -> Path:
    """Writes report.html from a run's config.json, metrics.jsonl and samples.jsonl, and returns its path.

    Any of them may be missing, cut short or damaged: the page then says less.
    """
    rows = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    config = _config(folder / "config.json")
    found = charts(rows) if rows else {}
    page = _template().render(
        name=folder.resolve().name,
        config=list(_flat(config)),
        headline=_headline(rows, config),
        sections={section: [(chart, curves(chart)) for chart in of_one] for section, of_one in found.items()},
        sizes=_sizes(rows),
        samples=shown_samples(read_samples(folder / "samples.jsonl")),
        shades=_shades(),
        lines=_probabilities(),
        plot=PLOT,
    )
    path = folder / "report.html"
    # Half of a surrogate pair, which JSON can hold, has no place in a file.
    write_whole(path, page.encode("utf-8", "replace").decode("utf-8"))
    return path


def _template() -> jinja2.Template:
    """Everything put into it is escaped, since prompts and completions may hold HTML."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(Path(__file__).with_name("report_page.html").read_text(encoding="utf-8"))


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names with their sections, and values as text."""
    found = []
    for name, value in config.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, "\u2013" if value is None else str(value)))
    return found


def _headline(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures one asks for first: (what, value)."""
    if not rows:
        return []
    # The last row may hold nothing but the evaluation after the last iteration.
    trained = [row for row in rows if "rewards/mean" in row] or rows
    last = trained[-NUM_LAST:]
    total = config.get("iterations")
    figures = [("iterations" + (f" of {total:,}" if isinstance(total, int) else ""), f"{trained[-1]['step'] + 1:,}")]
    of_last = {
        "reward": ("rewards/mean", "{:.3f}"),
        "exact answers": ("rewards/exact", "{:.1%}"),
        "ids per support": ("support/size_mean", "{:.2f}"),
        "supports of one id": ("support/one_id_share", "{:.0%}"),
        "entropy, nats": ("entropy", "{:.3f}"),
        "tokens/s": ("tokens_per_second", "{:,.0f}"),
    }
    for label, (name, text) in of_last.items():
        values = column(last, name)
        if np.isfinite(values).any():
            figures.append((label, text.format(np.nanmean(np.where(np.isfinite(values), values, np.nan)))))
    for name in sorted({name for row in rows for name in row if name.startswith("eval/")}):
        values = column(rows, name)
        values = values[np.isfinite(values)]
        if len(values):
            first = f"{values[0]:.1%} \u2192 " if len(values) > 1 else ""
            figures.append((f"held out, {name[5:]}", f"{first}{values[-1]:.1%}"))
    errors = column(rows, "ratio/max_error")
    if np.isfinite(errors).any():
        figures.append(("largest |ratio \u2212 1| of the run", f"{np.nanmax(errors):.1e}"))
    minutes = np.nansum(column(rows, "seconds")) / 60
    time = f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:,.1f} h"
    return [*figures, ("time", time)] if minutes > 0 else figures


def _sizes(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The heat map of support sizes over time; None where no row has a histogram."""
    kept = [row for row in rows if isinstance(row.get("support/histogram"), list) and row["support/histogram"]]
    num = max((len(row["support/histogram"]) for row in kept), default=0)
    if num == 0:
        return None
    counts = np.zeros((len(kept), num))
    for place, row in enumerate(kept):
        counts[place, : len(row["support/histogram"])] = row["support/histogram"]
    counts = np.add.reduceat(counts, bin_starts(len(kept), MAX_COLUMNS), axis=0)
    counts = counts[:, : int(np.flatnonzero(counts.any(axis=0))[-1]) + 1] if counts.any() else counts[:, :1]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    steps = np.array([kept[0]["step"], kept[-1]["step"]], np.float64)
    return heat_map("Support sizes over time", steps, shares, bucket_labels(counts.shape[1]))


def bucket_labels(num: int) -> list[str]:
    """What the buckets of a histogram of sizes hold: "1", "2", "3-4", "5-8", ..."""
    return ["1", "2", *(f"{2 ** (bucket - 1) + 1}\u2013{2**bucket}" for bucket in range(2, num))][:num]


def _shades() -> list[str]:
    labels = bucket_labels(len(SIZE_LIMITS))
    return [f"{label} id" if label == "1" else f"{label} ids" for label in labels] + [
        f"more than {SIZE_LIMITS[-1]} ids"
    ]


def _probabilities() -> list[str]:
    return [f"p \u2265 {PROBABILITY_LIMITS[0]:g}", *(f"p < {limit:g}" for limit in PROBABILITY_LIMITS)]
