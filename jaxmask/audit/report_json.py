"""An audit as JSON values, in a form that stays: docs/audit.md says what each field means."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxmask.audit.finding import Finding
from jaxmask.audit.outcome import Outcome
from jaxmask.audit.statistics import CLIP, NUM_MASS_BINS, SIZE_LIMITS

SCHEMA = "jaxmask.audit/1"


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """The outcome as mappings, lists, strings, finite numbers, booleans and None: `json.dumps` takes it as it is."""
    return {
        "schema": SCHEMA,
        "verdict": outcome.verdict,
        "is_fit": outcome.is_fit,
        "is_strict": outcome.is_strict,
        "num_rows_at_fault": outcome.num_rows_at_fault,
        "vocab_size": outcome.vocab_size,
        "files": [dataclasses.asdict(source) for source in outcome.sources],
        "findings": [_finding(finding) for finding in outcome.findings],
        "statistics": _statistics(outcome),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "title": finding.title,
        "remedy": finding.remedy,
        "count": finding.count,
        "num_rows": finding.num_rows,
        "worst": [
            {"row": place.row, "position": None if place.position < 0 else place.position, "detail": place.detail}
            for place in finding.worst
        ],
    }


def _statistics(outcome: Outcome) -> dict[str, Any]:
    values = dataclasses.asdict(outcome.statistics)
    sizes, mass = outcome.statistics.sizes, outcome.statistics.kept_mass
    if sizes is not None:
        values["sizes"]["histogram"] = [
            {"up_to": limit, "num": num} for limit, num in zip(SIZE_LIMITS, sizes.histogram, strict=False)
        ]
    if mass is not None:
        values["kept_mass"]["clip"] = CLIP
        values["kept_mass"]["histogram"] = [
            {"up_to": (place + 1) / NUM_MASS_BINS, "num": num} for place, num in enumerate(mass.histogram)
        ]
    values["stretches"] = list(values["stretches"])
    values["encodings"] = list(values["encodings"])
    return values
