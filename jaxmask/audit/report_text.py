"""An audit as text: the verdict first, then what is wrong and where, then what truncation did."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxmask.audit.finding import Finding, Severity
from jaxmask.audit.outcome import Outcome, count, how_often
from jaxmask.audit.statistics import CLIP, SIZE_LIMITS, KeptMass, Sizes, Statistics

_BAR = 32
_LABEL = 22
# Escape sequences of terminals, by what they mean here.
_PLAIN, _BOLD, _RED, _YELLOW, _GREEN = "\x1b[0m", "\x1b[1m", "\x1b[1;31m", "\x1b[33m", "\x1b[1;32m"


def to_text(outcome: Outcome, *, is_coloured: bool = False) -> str:
    """The report, lines of about 120 characters.

    Args:
      outcome: of an audit.
      is_coloured: with a terminal's escape sequences. None that stand in the files come through.
    """
    paint = _painted if is_coloured else _unpainted
    lines = [paint(outcome.verdict, _GREEN if outcome.is_fit else _RED), ""]
    lines += _sources(outcome)
    for severity, colour in ((Severity.ERROR, _RED), (Severity.WARNING, _YELLOW)):
        found = [one for one in outcome.findings if one.severity is severity]
        if found:
            lines += ["", paint(f"{severity.value}s", _BOLD)]
        for finding in found:
            lines += _finding(finding, paint(finding.code, colour))
    sections = {"supports": _supports(outcome.statistics), **_mass(outcome.statistics)}
    sections["bytes per token"] = _encodings(outcome.statistics)
    for title, body in sections.items():
        lines += ["", paint(title, _BOLD), *body]
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """The text with everything that a terminal would act on written out: "\\x1b" in place of an escape."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def size_labels(num: int) -> list[str]:
    """What the buckets of a histogram of sizes hold: "1", "2", "3-4", "5-8", ..."""
    return [
        str(limit) if limit < 3 else f"{SIZE_LIMITS[place - 1] + 1}-{limit}"
        for place, limit in enumerate(SIZE_LIMITS[:num])
    ]


def _painted(text: str, colour: str) -> str:
    return f"{colour}{text}{_PLAIN}"


def _unpainted(text: str, colour: str) -> str:
    return text


def _row(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{text}"


def _sources(outcome: Outcome) -> list[str]:
    width = max((len(printable(one.name)) for one in outcome.sources), default=0)
    lines = [
        f"  {printable(one.name):<{width}}  {one.form}  {count(one.num_rows, 'row')}"
        + (f", {count(one.num_skipped, 'refusal')} passed over" if one.num_skipped else "")
        for one in outcome.sources
    ]
    vocabulary = (
        "the vocabulary's size is not known (--vocab-size): ids were only checked to be 0 or more"
        if outcome.vocab_size is None
        else f"ids were checked against a vocabulary of {outcome.vocab_size:,}"
    )
    return [*lines, f"  {vocabulary}"]


def _finding(finding: Finding, code: str) -> list[str]:
    lines = [f"  {code}  {how_often(finding)}", f"    {finding.title} {finding.remedy}"]
    for place in finding.worst:
        position = f", position {place.position}" if place.position >= 0 else ""
        lines.append(f"      {printable(place.row)}{position}: {printable(place.detail)}")
    left = finding.count - len(finding.worst)
    return lines + ([f"      and {left:,} more"] if left > 0 and finding.worst else [])


def _supports(statistics: Statistics) -> list[str]:
    trained = "all" if statistics.num_trained == statistics.num_tokens else f"{statistics.num_trained:,}"
    lines = [_row("tokens", f"{statistics.num_tokens:,} in {count(statistics.num_rows, 'row')}, {trained} train")]
    sizes = statistics.sizes
    if sizes is None:
        return [*lines, _row("ids per support", "no support to look at")]
    figures = f"mean {sizes.mean:.2f}, median {sizes.median:,}, 90 % {sizes.p90:,}, 99 % {sizes.p99:,}"
    lines.append(_row("ids per support", f"{figures}, largest {sizes.largest:,}"))
    lines.append(_row("of one id", f"{sizes.one_id_share:.1%}: no choice, log-probability 0, no gradient"))
    if statistics.entropy is not None:
        lines.append(_row("entropy", f"{statistics.entropy:.3f} nats, mean over supports"))
    return lines + _bars(sizes)


def _bars(sizes: Sizes) -> list[str]:
    most, below = max(sizes.histogram), 0
    lines = []
    for label, number in zip(size_labels(len(sizes.histogram)), sizes.histogram, strict=True):
        below += number
        bar = "#" * round(_BAR * number / most)
        share, so_far = number / sizes.num, below / sizes.num
        lines.append(f"  {label:>{_LABEL - 2}}  {bar:<{_BAR}} {share:>6.1%}  {so_far:>6.1%} so far")
    return lines


def _mass(statistics: Statistics) -> dict[str, Sequence[str]]:
    mass = statistics.kept_mass
    if mass is None:
        return {"kept mass": [_row("not known", statistics.mass_note)]}
    spread = f"1 % below {mass.p1:.4f}, 10 % {mass.p10:.4f}, median {mass.median:.4f}, 90 % {mass.p90:.4f}"
    return {
        "kept mass: what the full policy gives to the supports": [
            _row("of a token", f"mean {mass.mean:.4f}, least {mass.least:.4g}; {spread}")
        ],
        "ratio before the first update, where behaviour and policy have the same weights": _ratio(mass),
    }


def _ratio(mass: KeptMass) -> list[str]:
    lines = [
        _row("over the supports", "1"),
        _row("over the vocabulary", f"mean {mass.mean:.4f}, bias {mass.mean - 1:+.4f}, least {mass.least:.4g}"),
        _row("  beyond the clip", f"{mass.clipped_share:.2%} of tokens are below {1 - CLIP:g}"),
        _row("  mismatch KL", f"{mass.mismatch_kl:.3g} nats (k3)"),
    ]
    if mass.mean_log_of_row is not None and mass.least_of_row is not None:
        typical = f"typically {math.exp(mass.mean_log_of_row):.3g} (mean of its logarithm {mass.mean_log_of_row:.3f})"
        text = f"{typical}, least {mass.least_of_row:.3g}, in {count(mass.num_rows, 'row')}"
        lines.append(_row("  of a completion", text))
    return lines


def _encodings(statistics: Statistics) -> list[str]:
    return [
        _row(one.name, f"{'?' if one.bytes_per_token is None else f'{one.bytes_per_token:,.1f}':>10}  {one.note}")
        for one in statistics.encodings
    ]
