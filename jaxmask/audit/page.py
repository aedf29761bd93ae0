"""An audit as one page that needs nothing but itself: no script, no network, light and dark."""

from __future__ import annotations

import html
import math
import string
from collections.abc import Iterable
from pathlib import Path

from jaxmask.audit import charts
from jaxmask.audit.finding import Finding
from jaxmask.audit.outcome import Outcome, count, how_often
from jaxmask.audit.report_text import printable, size_labels
from jaxmask.audit.statistics import CLIP, NUM_MASS_BINS, KeptMass, Sizes, Statistics, Stretch


def to_html(outcome: Outcome) -> str:
    """The page. Everything that comes from the files is escaped."""
    statistics = outcome.statistics
    template = string.Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    note = f'<p class="note">Kept mass: {_escaped(statistics.mass_note)}.</p>' if statistics.mass_note else ""
    return template.substitute(
        title=_escaped(f"Audit of {', '.join(one.name for one in outcome.sources)}"),
        state="fit" if outcome.is_fit else "unfit",
        verdict=_escaped(outcome.verdict[:1].upper() + outcome.verdict[1:]),
        sources=_sources(outcome),
        figures="\n".join(
            f"<div><span>{_escaped(what)}</span><b>{_escaped(value)}</b></div>" for what, value in _figures(statistics)
        ),
        findings=_findings(outcome),
        note=note,
        charts="\n".join(_charts(statistics)),
        encodings=_encodings(statistics),
    )


def framed(outcome: Outcome) -> str:
    """The page inside of another one, which its styles leave alone."""
    return f'<iframe style="width: 100%; height: 640px; border: 0" srcdoc="{html.escape(to_html(outcome))}"></iframe>'


def _escaped(text: str) -> str:
    # Half of a surrogate pair, which JSON can hold, has no place in a file; `printable` writes it out.
    return html.escape(printable(text))


def _sources(outcome: Outcome) -> str:
    names = (
        f"{one.name}: {count(one.num_rows, 'row')} of form {one.form}"
        + (f", {count(one.num_skipped, 'refusal')} passed over" if one.num_skipped else "")
        for one in outcome.sources
    )
    vocabulary = (
        "The vocabulary's size is not known: ids were only checked to be 0 or more."
        if outcome.vocab_size is None
        else f"Ids were checked against a vocabulary of {outcome.vocab_size:,}."
    )
    return "\n".join(f"<p>{_escaped(text)}</p>" for text in (*names, vocabulary))


def _figures(statistics: Statistics) -> Iterable[tuple[str, str]]:
    yield "tokens", f"{statistics.num_tokens:,}"
    yield "rows", f"{statistics.num_rows:,}"
    if statistics.num_trained != statistics.num_tokens:
        yield "tokens that train", f"{statistics.num_trained:,}"
    sizes, mass = statistics.sizes, statistics.kept_mass
    if sizes is not None:
        yield "ids per support, mean", f"{sizes.mean:.2f}"
        yield "median", f"{sizes.median:,}"
        yield "99 % have at most", f"{sizes.p99:,}"
        yield "supports of one id", f"{sizes.one_id_share:.1%}"
    if statistics.entropy is not None:
        yield "entropy, nats", f"{statistics.entropy:.3f}"
    if mass is None:
        yield "kept mass", "not known"
    else:
        yield "kept mass, mean", f"{mass.mean:.4f}"
        yield "full ratio, bias", f"{mass.mean - 1:+.4f}"
        yield f"full ratio below {1 - CLIP:g}", f"{mass.clipped_share:.2%}"
        if mass.mean_log_of_row is not None:
            yield "full ratio of a completion", f"{math.exp(mass.mean_log_of_row):.3g}"


def _findings(outcome: Outcome) -> str:
    if not outcome.findings:
        return "<h2>Findings</h2><p>None: every check passed.</p>"
    return "<h2>Findings</h2>\n" + "\n".join(_finding(one) for one in outcome.findings)


def _finding(finding: Finding) -> str:
    places = "".join(
        f'<tr><td class="place">{_escaped(one.row)}</td>'
        f'<td class="number">{one.position if one.position >= 0 else "all"}</td><td>{_escaped(one.detail)}</td></tr>'
        for one in finding.worst
    )
    table = (
        '<div class="places"><table><tr><th>row</th><th class="number">position</th><th>found</th></tr>{}</table></div>'
    )
    left = finding.count - len(finding.worst)
    more = f'<p class="note">and {left:,} more</p>' if left > 0 and places else ""
    return (
        f'<div class="finding {finding.severity.value}"><h3><code>{finding.code}</code> &middot; '
        f"{finding.severity.value}, {how_often(finding)}</h3>"
        f"<p>{_escaped(finding.title)} {_escaped(finding.remedy)}</p>"
        f"{table.format(places) if places else ''}{more}</div>"
    )


def _charts(statistics: Statistics) -> Iterable[str]:
    if statistics.sizes is not None:
        yield from _size_charts(statistics.sizes)
    if statistics.kept_mass is not None:
        yield from _mass_charts(statistics.kept_mass, statistics.stretches)
    if len(statistics.stretches) > 1:
        yield from _position_charts(statistics.stretches)


def _size_charts(sizes: Sizes) -> Iterable[str]:
    labels = size_labels(len(sizes.histogram))
    shares = [number / sizes.num for number in sizes.histogram]
    note = f"One id is no choice, and no gradient: {sizes.one_id_share:.1%} of the supports."
    yield _chart("Support sizes", note, charts.columns("Share of supports by size", "ids per support", labels, shares))
    picture = charts.steps("Share of supports up to each size", "ids per support, at most", labels, shares)
    yield _chart(
        "Supports up to a size", f"99 % hold at most {sizes.p99:,} ids, the widest {sizes.largest:,}.", picture
    )


def _position_charts(stretches: tuple[Stretch, ...]) -> Iterable[str]:
    starts = [float(one.start) for one in stretches]
    means, shares = [one.mean_size for one in stretches], [one.one_id_share for one in stretches]
    note = "Mean ids per support along the completions."
    yield _chart("Support size by position", note, charts.curve("Mean size by position", "position", starts, means))
    picture = charts.curve("Share of one-id supports by position", "position", starts, shares, is_share=True)
    yield _chart("One-id supports by position", "Where the completions had no choice.", picture)


def _mass_charts(mass: KeptMass, stretches: tuple[Stretch, ...]) -> Iterable[str]:
    shares = [number / mass.num for number in mass.histogram]
    labels = [f"{place / NUM_MASS_BINS:g}" for place in range(NUM_MASS_BINS)]
    marks = [(1 - CLIP, f"clip {1 - CLIP:g}")]
    picture = charts.columns(
        "Kept mass of tokens", "kept mass = full-vocabulary ratio", labels, shares, lines=marks, every=10
    )
    note = (
        f"A learner that scores over the vocabulary sees these ratios before its first update, {mass.mean:.4f} on "
        "average; over the supports all are 1."
    )
    yield _chart("Kept mass, and the ratio it makes", note, picture)
    known = [(float(one.start), one.mean_mass) for one in stretches if one.mean_mass is not None]
    if len(known) > 1:
        starts, means = zip(*known, strict=True)
        least = max(min(means) - 0.1, 0.0)
        picture = charts.curve("Mean kept mass by position", "position", starts, means, least=least)
        yield _chart("Kept mass by position", "Mean of what the full policy gives to the supports.", picture)


def _chart(title: str, note: str, picture: str) -> str:
    return f'<div class="chart"><h3>{html.escape(title)}</h3><p class="note">{html.escape(note)}</p>{picture}</div>'


def _encodings(statistics: Statistics) -> str:
    rows = "".join(
        f'<tr><td>{_escaped(one.name)}</td><td class="number">'
        f"{'?' if one.bytes_per_token is None else f'{one.bytes_per_token:,.1f}'}</td>"
        f"<td>{_escaped(one.note)}</td></tr>"
        for one in statistics.encodings
    )
    head = '<tr><th>form</th><th class="number">bytes</th><th>what it is</th></tr>'
    table = f'<div class="places"><table>{head}{rows}</table></div>'
    known = [(one.name, one.bytes_per_token) for one in statistics.encodings if one.bytes_per_token]
    if not known:
        return table
    picture = charts.lying_bars("Bytes per token in each form", "bytes per token", *zip(*known, strict=True))
    chart = _chart("Supports in each form", "The last is all of the files.", picture)
    return f'<div class="beside">{chart}{table}</div>'
