"""What the supports of a file weigh in each form in which they travel."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from jaxmask.audit.rows import Rows
from jaxmask.audit.statistics import Encoding

_ID_BYTES = _OFFSET_BYTES = _COUNT_BYTES = 4
_POWERS = 10 ** np.arange(1, 19)


class Weights:
    """Bytes of all supports so far."""

    def __init__(self) -> None:
        """None so far."""
        self.num_tokens = self.num_ids = self._json = self._base64 = self._file = 0

    def add(self, rows: Rows) -> None:
        """Those of a block, whether their tokens train or not."""
        num_rows, num_tokens = len(rows.lengths), len(rows.token_ids)
        sizes, ids = rows.support_sizes, rows.support_ids
        self.num_tokens += num_tokens
        self.num_ids += len(ids)
        self._file += rows.num_bytes
        # [[1,20],null,[]]: digits and commas of each support and its brackets, "null", commas between, brackets.
        inside = int(digits(ids).sum() + np.maximum(sizes - 1, 0).sum())
        nulls = int((sizes < 0).sum())
        self._json += inside + 2 * (num_tokens - nulls) + 4 * nulls
        self._json += int(np.maximum(rows.lengths - 1, 0).sum()) + 2 * num_rows
        row_ids = np.bincount(rows.row_of_token, weights=np.maximum(sizes, 0), minlength=num_rows).astype(np.int64)
        self._base64 += int((_base64(_ID_BYTES * row_ids) + _base64(_OFFSET_BYTES * (rows.lengths + 1))).sum())

    def encodings(self, p99: int, largest: int, vocab_size: int | None) -> tuple[Encoding, ...]:
        """Each form's bytes per token.

        Args:
          p99: size that 99 % of the supports do not exceed.
          largest: size of the widest.
          vocab_size: V; None: not known.
        """
        num = max(self.num_tokens, 1)
        bits = None if vocab_size is None else float(-(-vocab_size // 8))
        whole = Encoding(f"cells of {largest}", _cells(largest), "all supports fit; int32 ids and a count")
        narrow = Encoding(f"cells of {p99}", _cells(p99), "99 % of supports fit, the others overflow")
        return (
            Encoding("nested lists, JSON", self._json / num, "[[1,20],[7]], without spaces"),
            Encoding("CSR, base64", self._base64 / num, "int32 ids and int32 offsets of each row"),
            Encoding(
                "CSR, npz",
                (_ID_BYTES * self.num_ids + _OFFSET_BYTES * (self.num_tokens + 1)) / num,
                "int32 ids and int32 offsets, not compressed",
            ),
            *((narrow, whole) if p99 < largest else (whole,)),
            Encoding("packed bits", bits, "not known: say --vocab-size" if bits is None else f"V = {vocab_size}"),
            Encoding("as they came", self._file / num, "tokens, log-probabilities and all"),
        )


def digits(values: Int[np.ndarray, " K"]) -> Int[np.ndarray, " K"]:
    """Characters of each integer in decimal, with its sign."""
    return 1 + np.searchsorted(_POWERS, np.abs(values), side="right") + (values < 0)


def _base64(num_bytes: Int[np.ndarray, " R"]) -> Int[np.ndarray, " R"]:
    return 4 * -(-num_bytes // 3)


def _cells(width: int) -> float:
    return float(_ID_BYTES * width + _COUNT_BYTES)
