"""A block of rows, with what several checks want to know of it, each worked out once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmask.audit.finding import Place
from jaxmask.audit.logit_values import LogitValues, logit_values
from jaxmask.audit.rows import Rows


@dataclasses.dataclass(frozen=True, eq=False)
class Marks:
    """The places of a block at which a check found its fault.

    Attributes:
      rows: of the block.
      positions: in the row; -1 where the whole row is meant.
      badness: the larger, the worse.
      detail: what was found at the place of an index, in words; asked for of the worst alone.
    """

    rows: Int[np.ndarray, " M"]
    positions: Int[np.ndarray, " M"]
    badness: Float[np.ndarray, " M"]
    detail: Callable[[int], str]

    def place(self, index: int, names: tuple[str, ...]) -> Place:
        """The place of an index, for people; `names` are those of the rows."""
        name, position = names[int(self.rows[index])], int(self.positions[index])
        return Place(name, position, self.detail(index), float(self.badness[index]))


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Rows, and what they are checked against.

    Attributes:
      rows: what was read.
      vocab_size: number of ids, V; None: not known.
      eos_token_ids: ids at which the model ends a completion.
      tolerance: how far log-probabilities, and sums of probabilities, may be from what they should be.
      source: number of the file: names of rows, and numbers of groups, are those of one file.
    """

    rows: Rows
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    tolerance: float = 1e-3
    source: int = 0

    @functools.cached_property
    def row(self) -> Int[np.ndarray, " N"]:
        """The row of each token."""
        return self.rows.row_of_token

    @functools.cached_property
    def position(self) -> Int[np.ndarray, " N"]:
        """The place of each token in its row."""
        return self.rows.positions

    @functools.cached_property
    def owner(self) -> Int[np.ndarray, " K"]:
        """The token of each id of the supports."""
        return self.rows.token_of_id

    @functools.cached_property
    def starts(self) -> Int[np.ndarray, " N"]:
        """Where the support of each token begins in `support_ids`."""
        sizes = np.maximum(self.rows.support_sizes, 0)
        return np.cumsum(sizes) - sizes

    @functools.cached_property
    def first_tokens(self) -> Int[np.ndarray, " R"]:
        """The first token of each row, or where it would be."""
        return np.cumsum(self.rows.lengths) - self.rows.lengths

    @functools.cached_property
    def trains_in_row(self) -> Int[np.ndarray, " R"]:
        """Tokens of each row that train."""
        return self.count_in_rows(self.rows.trains)

    @functools.cached_property
    def holds_own(self) -> Bool[np.ndarray, " N"]:
        """Whether each token lies in its own support."""
        return self.holds(self.rows.token_ids)

    @functools.cached_property
    def temperature(self) -> Float[np.ndarray, " N"]:
        """That of each token; NaN where it is not known."""
        of_rows = [np.nan if one.temperature is None else float(one.temperature) for one in self.rows.settings]
        return np.array(of_rows, np.float64)[self.row]

    @functools.cached_property
    def logit_values(self) -> LogitValues | None:
        """What the logits say; None where the file has none."""
        rows = self.rows
        if rows.logits is None:
            return None
        return logit_values(rows.logits, rows.token_ids, rows.support_sizes, rows.support_ids, self.temperature)

    @functools.cached_property
    def is_stop(self) -> Bool[np.ndarray, " N"]:
        """Which tokens are a stop id of their row."""
        found = np.zeros(len(self.rows.token_ids), np.bool_)
        for row, setting in enumerate(self.rows.settings):
            ids = setting.stop_token_ids + (() if setting.ignore_eos else self.eos_token_ids)
            if ids:
                start = self.first_tokens[row]
                tokens = slice(start, start + self.rows.lengths[row])
                found[tokens] = np.isin(self.rows.token_ids[tokens], ids)
        return found

    def holds(self, wanted: Int[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        """Whether the support of each token holds the id wanted of it."""
        found = np.zeros(len(wanted), np.bool_)
        found[self.owner[self.rows.support_ids == wanted[self.owner]]] = True
        return found

    def count_in_rows(self, is_counted: Bool[np.ndarray, " N"]) -> Int[np.ndarray, " R"]:
        """How many tokens of each row are such."""
        return np.bincount(self.row[is_counted], minlength=len(self.rows.lengths))

    def support(self, token: int) -> Int[np.ndarray, " S"]:
        """The ids of a token's support."""
        start = self.starts[token]
        return self.rows.support_ids[start : start + max(self.rows.support_sizes[token], 0)]

    def at_tokens(
        self, is_marked: Bool[np.ndarray, " N"], detail: Callable[[int], str], badness: np.ndarray | None = None
    ) -> Marks:
        """Marks at the tokens of a mask; `detail` is asked with a token of the block, `badness` is per token."""
        tokens = np.flatnonzero(is_marked)
        worst = np.zeros(len(tokens)) if badness is None else badness[tokens].astype(np.float64)
        return Marks(self.row[tokens], self.position[tokens], worst, lambda index: detail(int(tokens[index])))

    def at_rows(
        self, is_marked: Bool[np.ndarray, " R"], detail: Callable[[int], str], badness: np.ndarray | None = None
    ) -> Marks:
        """Marks at whole rows; `detail` is asked with a row, `badness` is per row."""
        rows = np.flatnonzero(is_marked)
        worst = np.zeros(len(rows)) if badness is None else badness[rows].astype(np.float64)
        return Marks(rows, np.full(len(rows), -1), worst, lambda index: detail(int(rows[index])))

    def nowhere(self) -> Marks:
        """No marks at all."""
        return self.at_tokens(np.zeros(len(self.rows.token_ids), np.bool_), str)

    def shown_ids(self, token: int, most: int = 8) -> str:
        """A token's support for people: "[1, 5, 9, ...] (12 ids)"."""
        ids = self.support(token)
        cut = ", ..." if len(ids) > most else ""
        return f"[{', '.join(map(str, ids[:most].tolist()))}{cut}] ({len(ids)} {'id' if len(ids) == 1 else 'ids'})"


def joined(*parts: Marks) -> Marks:
    """Several marks as one."""
    ends = np.cumsum([len(part.rows) for part in parts])

    def detail(index: int) -> str:
        part = int(np.searchsorted(ends, index, side="right"))
        return parts[part].detail(index - int(ends[part]) + len(parts[part].rows))

    return Marks(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.badness for part in parts]),
        detail,
    )
