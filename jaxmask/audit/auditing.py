"""Files or rollouts in, what is wrong with them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxmask.audit import page, report_json, report_text
from jaxmask.audit.across import across_checks
from jaxmask.audit.block import Block
from jaxmask.audit.builder import RowsBuilder
from jaxmask.audit.check import Open
from jaxmask.audit.checks import CHECKS
from jaxmask.audit.exchange import Exchange, Where
from jaxmask.audit.files import AUTO, read
from jaxmask.audit.finding import Finding, Severity
from jaxmask.audit.measures import Measures
from jaxmask.audit.outcome import Outcome, Source
from jaxmask.audit.readers import rollouts
from jaxmask.audit.rows import Rows
from jaxmask.audit.statistics import Statistics
from jaxmask.audit.tally import Tally
from jaxmask.params import check_count
from jaxmask.rollout import Rollout
from jaxmask.rollout_file import to_arrays

NUM_SHOWN = 5
TOLERANCE = 1e-3
# Fewer supports than this may all be of one id by chance.
_FEW_SUPPORTS = 16
# So many tokens in a row were never all certain where they had a choice, unless the policy has none left.
_MANY_CHOICES = 64


class Audit(Outcome):
    """What an audit came to, and its reports."""

    def to_text(self, *, is_coloured: bool = False) -> str:
        """For a terminal; see `report_text.to_text`."""
        return report_text.to_text(self, is_coloured=is_coloured)

    def to_dict(self) -> dict[str, Any]:
        """For other programs; see `report_json.to_dict`."""
        return report_json.to_dict(self)

    def to_html(self) -> str:
        """One page with pictures, which needs nothing but itself."""
        return page.to_html(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return page.framed(self)


@dataclasses.dataclass(frozen=True)
class _Against:
    """What rows are checked against."""

    vocab_size: int | None
    eos_token_ids: tuple[int, ...]
    tolerance: float


class Auditor:
    """Takes blocks of rows in, one after another, and says what they come to."""

    def __init__(
        self,
        *,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        num_shown: int = NUM_SHOWN,
        is_strict: bool = False,
        tolerance: float = TOLERANCE,
    ):
        """Nothing taken in so far; arguments as those of `audit`."""
        vocab_size = None if vocab_size is None else check_count("vocab_size", vocab_size)
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be in [0, 1), got {tolerance}.")
        if num_shown < 0:
            raise ValueError(f"num_shown must be 0 or more, got {num_shown}.")
        for token_id in eos_token_ids:
            if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
                end = "" if vocab_size is None else f" and below vocab_size {vocab_size}"
                raise ValueError(f"eos_token_ids must be 0 or more{end}, got {token_id}.")
        self._against = _Against(vocab_size, tuple(eos_token_ids), tolerance)
        self._is_strict = is_strict
        self._checks = (*CHECKS, *across_checks())
        self._tally = Tally(num_shown)
        self._measures = Measures()
        self._known_size = vocab_size
        self._num_choices = self._num_uncertain = 0

    def add(self, rows: Rows, source: int = 0) -> None:
        """One more block, of a file of this number."""
        said = rows.vocab_size if rows.logits is None else rows.logits.shape[1]
        size = said if self._against.vocab_size is None else self._against.vocab_size
        self._known_size = size if self._known_size is None else max(self._known_size, size or 0)
        block = Block(rows, size, self._against.eos_token_ids, self._against.tolerance, source)
        is_open = Open.of(block)
        self._tally.add(block, [(check, is_open.apply(check, block)) for check in self._checks])
        self._measures.add(block, is_open)
        is_choice = is_open.logprobs & (rows.support_sizes > 1) & rows.has_logprob
        self._num_choices += int(is_choice.sum())
        self._num_uncertain += int((rows.logprobs[is_choice] < 0).sum())

    def result(self, sources: Iterable[Source]) -> Audit:
        """What it came to so far.

        Args:
          sources: where the blocks came from.
        """
        statistics = self._measures.statistics(self._known_size)
        is_all_zero = self._num_choices >= _MANY_CHOICES and self._num_uncertain == 0
        findings = self._tally.findings(self._checks) + _of_all(statistics)
        findings += _all_zero(self._num_choices, statistics) if is_all_zero else ()
        order = {Severity.ERROR: 0, Severity.WARNING: 1}
        return Audit(
            sources=tuple(sources),
            findings=tuple(sorted(findings, key=lambda one: order[one.severity])),
            statistics=statistics,
            vocab_size=self._known_size,
            num_rows_at_fault=statistics.num_rows if is_all_zero else self._tally.num_rows_at_fault,
            is_strict=self._is_strict,
        )


def audit(
    paths: str | Path | Sequence[str | Path],
    *,
    form: str = AUTO,
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] = (),
    num_shown: int = NUM_SHOWN,
    is_strict: bool = False,
    tolerance: float = TOLERANCE,
) -> Audit:
    """Whether the rollouts of some files are fit to train on, and what truncation did to them.

    JSON lines are read block by block: files of them may be larger than the memory.

    Args:
      paths: one file or several, in any form that `jaxmask.audit.files` reads.
      form: of all files; "auto" finds it out for each.
      vocab_size: number of ids, V; by default what the files say. Where nobody knows it, ids are checked to be 0 or
        more, and nothing else.
      eos_token_ids: ids at which the model ends a completion; stop ids that a file gives count besides.
      num_shown: places that are named of each kind of fault.
      is_strict: whether warnings make rollouts unfit, too.
      tolerance: how far log-probabilities and sums of probabilities may be off; in [0, 1). Above 1, relative.

    Returns:
      The audit: `is_fit`, `findings`, `statistics`, and reports.

    Raises:
      UnreadableError: a file that is not there, or holds nothing that is known.
      ValueError: arguments out of their ranges; no file.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not paths:
        raise ValueError("paths must be one file at least, got none.")
    auditor = Auditor(
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        num_shown=num_shown,
        is_strict=is_strict,
        tolerance=tolerance,
    )
    sources: list[Source] = []
    for path in paths:
        reading = read(Path(path), form=form)
        num_rows = 0
        for rows in reading:
            num_rows += len(rows.lengths)
            auditor.add(rows, len(sources))
        sources.append(Source(str(path), reading.form, num_rows, reading.num_skipped))
    return auditor.result(sources)


def audit_rollout(
    rollout: Rollout,
    *,
    full_logprobs: Float[Array | np.ndarray, "B T"] | None = None,
    kept_logprobs: Float[Array | np.ndarray, " K"] | None = None,
    logits: Float[Array | np.ndarray, "B T V"] | None = None,
    num_shown: int = NUM_SHOWN,
    is_strict: bool = False,
    tolerance: float = TOLERANCE,
) -> Audit:
    """The audit of a rollout in memory, which comes to the host for it.

    Args:
      rollout: any; its vocabulary and stop ids count.
      full_logprobs: of each token over the vocabulary at its row's temperature, natural: they give the kept mass.
      kept_logprobs: of each id of the supports over its support, in the order of `jaxmask.wire.to_csr`.
      logits: of each token, after penalties and bias, before temperature and filters; they give all of that.
      num_shown: as for `audit`, like the following.
      is_strict: as there.
      tolerance: as there.
    """
    arrays = to_arrays(rollout, full_logprobs=full_logprobs, kept_logprobs=kept_logprobs, logits=logits)
    auditor = Auditor(num_shown=num_shown, is_strict=is_strict, tolerance=tolerance)
    builder = RowsBuilder()
    num_bytes = sum(array.nbytes for array in arrays.values())
    for completion in rollouts.completions(Exchange(Where("rollout", 0), None, arrays, is_refused=False)):
        builder.add(completion, num_bytes)
        num_bytes = 0
        if builder.is_full:
            auditor.add(builder.build())
    if not builder.is_empty:
        auditor.add(builder.build())
    return auditor.result([Source("rollout", "memory", int(rollout.lengths.shape[0]))])


def _of_all(statistics: Statistics) -> tuple[Finding, ...]:
    """What only all rows together show."""
    sizes = statistics.sizes
    if sizes is None or sizes.num < _FEW_SUPPORTS or sizes.one_id_share < 1:
        return ()
    return (
        Finding(
            "one-id-only",
            Severity.WARNING,
            "Every support holds a single id.",
            "There is nothing to learn from them: greedy settings, or supports cut down to the token?",
            sizes.num,
            statistics.num_rows,
            (),
        ),
    )


def _all_zero(number: int, statistics: Statistics) -> tuple[Finding, ...]:
    return (
        Finding(
            "logprobs-all-zero",
            Severity.ERROR,
            "All log-probabilities are 0, though the supports leave a choice.",
            "A token drawn from several ids has a probability below 1: send what the engine gave, and no zeros for it.",
            number,
            statistics.num_rows,
            (),
        ),
    )
