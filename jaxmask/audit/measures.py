"""From blocks to statistics, in one pass and in a memory that does not grow with the number of tokens."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from jaxmask.audit.block import Block
from jaxmask.audit.check import Open
from jaxmask.audit.encodings import Weights
from jaxmask.audit.histogram import Shares, added, quantile
from jaxmask.audit.logprob_checks import kept_sums
from jaxmask.audit.remarks import kept_mass
from jaxmask.audit.rows import Setting
from jaxmask.audit.statistics import (
    CLIP,
    MAX_STRETCHES,
    NUM_MASS_BINS,
    SIZE_LIMITS,
    KeptMass,
    Sizes,
    Statistics,
    Stretch,
)


class Measures:
    """Sums over the blocks so far, of tokens that train and are not at fault."""

    def __init__(self) -> None:
        """None so far."""
        self._num_rows = self._num_trained = 0
        self._weights = Weights()
        self._counts = np.zeros(1, np.int64)
        self._positions = _Positions()
        self._entropy_sum, self._entropy_num = 0.0, 0
        self._mass = Mass()
        self._settings: set[Setting] = set()

    def add(self, block: Block, is_open: Open) -> None:
        """One more block, of which the checks have left this open."""
        rows = block.rows
        self._num_rows += len(rows.lengths)
        self._num_trained += int(rows.trains.sum())
        self._weights.add(rows)
        is_seen = is_open.supports & (rows.support_sizes > 0)
        self._counts = added(self._counts, np.bincount(rows.support_sizes[is_seen], minlength=1))
        mass = np.where(is_open.logprobs & is_seen, kept_mass(block), np.nan)
        self._positions.add(block.position[is_seen], rows.support_sizes[is_seen], mass[is_seen])
        self._mass.add(block, mass)
        self._add_entropy(block, is_open.logprobs & is_seen)
        # Enough to say what filtered, where the kept mass is not known.
        if len(self._settings) < 16:
            self._settings.update(rows.settings)

    def statistics(self, vocab_size: int | None) -> Statistics:
        """The figures so far."""
        sizes = self._sizes()
        p99, largest = (0, 0) if sizes is None else (sizes.p99, sizes.largest)
        mass = self._mass.result()
        return Statistics(
            num_rows=self._num_rows,
            num_tokens=self._weights.num_tokens,
            num_trained=self._num_trained,
            num_ids=self._weights.num_ids,
            sizes=sizes,
            entropy=self._entropy_sum / self._entropy_num if self._entropy_num else None,
            kept_mass=mass,
            mass_note="" if mass is not None else _mass_note(self._settings),
            stretches=self._positions.stretches(),
            encodings=self._weights.encodings(p99, largest, vocab_size),
        )

    def _add_entropy(self, block: Block, is_seen: Bool[np.ndarray, " N"]) -> None:
        kept = block.rows.kept_logprobs
        if kept is None:
            return
        is_whole = is_seen & (np.abs(kept_sums(block) - 1) <= block.tolerance)
        values = np.where(np.isfinite(kept), kept, 0.0).astype(np.float64)
        values = np.where(is_whole[block.owner], values, 0.0)
        terms = -values * np.exp(values)
        self._entropy_sum += float(terms.sum())
        self._entropy_num += int(is_whole.sum())

    def _sizes(self) -> Sizes | None:
        num = int(self._counts.sum())
        if num == 0:
            return None
        sizes = np.arange(len(self._counts))
        buckets = np.minimum(np.searchsorted(SIZE_LIMITS, sizes), len(SIZE_LIMITS) - 1)
        histogram = np.bincount(buckets, weights=self._counts, minlength=len(SIZE_LIMITS)).astype(np.int64)
        last = int(np.flatnonzero(histogram)[-1])
        return Sizes(
            num=num,
            mean=float((sizes * self._counts).sum() / num),
            median=quantile(self._counts, 0.5),
            p90=quantile(self._counts, 0.9),
            p99=quantile(self._counts, 0.99),
            largest=int(np.flatnonzero(self._counts)[-1]),
            one_id_share=float(self._counts[1] / num) if len(self._counts) > 1 else 0.0,
            histogram=tuple(histogram[: last + 1].tolist()),
        )


class Mass:
    """Kept mass S of tokens, and of rows as a whole."""

    def __init__(self) -> None:
        """None so far."""
        self._shares = Shares()
        self._num_clipped, self._log_sum = 0, 0.0
        self._num_rows, self._row_log_sum, self._least_row_log = 0, 0.0, 0.0

    def add(self, block: Block, mass: Float[np.ndarray, " N"]) -> None:
        """Those of a block; NaN where not known."""
        is_known = ~np.isnan(mass)
        self._shares.add(mass[is_known])
        self._num_clipped += int((mass[is_known] < 1 - CLIP).sum())
        logs = np.log(np.where(is_known, mass, 1.0))
        self._log_sum += float(logs.sum())
        is_whole = (block.count_in_rows(is_known) == block.trains_in_row) & (block.trains_in_row > 0)
        of_rows = np.bincount(block.row, weights=logs, minlength=len(block.rows.lengths))[is_whole]
        self._num_rows += len(of_rows)
        self._row_log_sum += float(of_rows.sum())
        self._least_row_log = min(self._least_row_log, float(of_rows.min(initial=0.0)))

    def result(self) -> KeptMass | None:
        """The figures so far; None without a single token."""
        shares = self._shares
        if shares.num == 0:
            return None
        mean_log = self._log_sum / shares.num
        return KeptMass(
            num=shares.num,
            mean=shares.mean,
            least=shares.least,
            p1=shares.quantile(0.01),
            p10=shares.quantile(0.1),
            median=shares.quantile(0.5),
            p90=shares.quantile(0.9),
            clipped_share=self._num_clipped / shares.num,
            mean_log=mean_log,
            mismatch_kl=shares.mean - 1 - mean_log,
            num_rows=self._num_rows,
            mean_log_of_row=self._row_log_sum / self._num_rows if self._num_rows else None,
            least_of_row=float(np.exp(self._least_row_log)) if self._num_rows else None,
            histogram=tuple(shares.histogram(NUM_MASS_BINS).tolist()),
        )


class _Positions:
    """Sums at each position; as long as the longest completion."""

    def __init__(self) -> None:
        self._sums = [np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.int64, np.int64, np.float64)]

    def add(self, positions: np.ndarray, sizes: np.ndarray, mass: np.ndarray) -> None:
        is_known = ~np.isnan(mass)
        weights = (np.ones(len(sizes)), sizes, sizes == 1, is_known, np.where(is_known, mass, 0.0))
        more = [
            np.bincount(positions, weights=one).astype(self._sums[place].dtype) for place, one in enumerate(weights)
        ]
        self._sums = [added(total, one) for total, one in zip(self._sums, more, strict=True)]

    def stretches(self) -> tuple[Stretch, ...]:
        length = len(self._sums[0])
        if length == 0:
            return ()
        starts = np.unique(np.linspace(0, length, min(length, MAX_STRETCHES), endpoint=False).astype(int))
        ends = [*starts[1:].tolist(), length]
        sums = [np.add.reduceat(one, starts).tolist() for one in self._sums]
        return tuple(
            Stretch(start, end, num, size / num, one_id / num, mass / num_known if num_known else None)
            for start, end, num, size, one_id, num_known, mass in zip(starts.tolist(), ends, *sums, strict=True)
            if num
        )


def _mass_note(settings: set[Setting]) -> str:
    """What the settings say of the kept mass, and what would say it all."""
    top_p = {_top_p_alone(setting) for setting in settings}
    known = ""
    if top_p and None not in top_p:
        known = f"at least {min(one for one in top_p if one is not None):g}, as only top-p filtered; "
    return known + "give the log-probabilities over the vocabulary (full_logprobs) to learn it"


def _top_p_alone(setting: Setting) -> float | None:
    is_alone = setting.top_p is not None and setting.top_k in (0, -1) and setting.min_p == 0
    return setting.top_p if is_alone else None
