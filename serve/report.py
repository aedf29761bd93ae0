"""What comes back from the device after a few steps: ids and counts, and of supports no more than the ids they hold.

Kept ids of all tokens lie one after another, row by row, in a pool that has room for the largest supports there could
be. It is cut into segments, each as long as all before it, of which the host fetches those that are in use.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxmask.decoding import Decoding
from jaxmask.drawn import TopLogprobs
from jaxmask.recording import Recording
from jaxmask.support import Support
from serve.outputs import SamplingMask

# Bits of as many tokens are fetched at once.
_ROWS_OF_BITS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """New tokens of each slot, on the device.

    Attributes:
      token_ids: the first `counts` of each row.
      counts: new tokens.
      finish: a `Finish` code.
      num_steps: steps that were taken.
      num_busy: steps of all rows together in which they drew a token.
      sizes: ids in the support of each token; 0 where none is returned.
      pool: the ids themselves, in segments; those of supports wider than the cells are left out.
      packed: the supports as bits, where they may be wider.
      logprobs: of each token.
      ranks: of each token; None unless asked for.
      top: the likeliest tokens; None unless asked for.
    """

    token_ids: Int[Array, "B K"]
    counts: Int[Array, " B"]
    finish: Int[Array, " B"]
    num_steps: Int[Array, ""]
    num_busy: Int[Array, ""]
    sizes: Int[Array, "B K"]
    pool: tuple[Int[Array, " _"], ...]
    packed: UInt[Array, "B K P"] | None
    logprobs: Float[Array, "B K"]
    ranks: Int[Array, "B K"] | None
    top: TopLogprobs | None

    @classmethod
    def of(cls, recording: Recording, state: Decoding) -> Report:
        """What was recorded up to this state. Runs under jit."""
        support = recording.support
        assert isinstance(support, Support)
        return cls(
            token_ids=recording.token_ids,
            counts=state.lengths - recording.starts,
            finish=state.finish,
            num_steps=recording.num_steps.max(),
            num_busy=recording.num_steps.sum(dtype=jnp.int32),
            sizes=support.counts,
            pool=_pool(support),
            packed=support.packed,
            logprobs=recording.logprobs,
            ranks=recording.ranks,
            top=recording.top,
        )

    def prefetch(self, num_ids: int, *, with_logprobs: bool) -> None:
        """Begins to copy what will be read, and the segments that so many ids take; nothing waits for it."""
        wanted: list[Array] = [self.token_ids, self.counts, self.finish, self.num_steps, self.num_busy]
        begin = 0
        for segment in self.pool if num_ids else ():
            wanted += [segment] if begin < num_ids else []
            begin += len(segment)
        wanted += [self.sizes] if num_ids else []
        wanted += jax.tree.leaves((self.logprobs, self.ranks, self.top)) if with_logprobs else []
        for leaf in wanted:
            leaf.copy_to_host_async()


@dataclasses.dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of some tokens of a row, on the host.

    Attributes:
      values: of the tokens.
      ranks: of the tokens.
      top_ids: the likeliest tokens at each place.
      top_values: their log-probabilities.
    """

    values: Float[np.ndarray, " T"]
    ranks: Int[np.ndarray, " T"]
    top_ids: Int[np.ndarray, "T N"]
    top_values: Float[np.ndarray, "T N"]


class Reading:
    """A report on the host; what nobody asks for is not fetched.

    Attributes:
      num_bytes: fetched so far.
      num_ids: ids of all supports that lie in the pool.
    """

    def __init__(self, report: Report):
        """Waits for the device to have finished the report's steps."""
        self._report, self.num_bytes = report, 0
        self.token_ids = self._fetch(report.token_ids)
        self.counts = self._fetch(report.counts)
        self.finish = self._fetch(report.finish)
        self.num_steps = int(self._fetch(report.num_steps))
        self.num_busy = int(self._fetch(report.num_busy))
        self.num_ids = 0

    def mask(self, row: int) -> SamplingMask:
        """Supports of a row's new tokens."""
        count = int(self.counts[row])
        sizes, stored = self._sizes[row, :count], self._stored[row, :count]
        begin = int(self._row_begins[row])
        ids = self._ids[begin : begin + int(stored.sum())]
        wide = np.flatnonzero(sizes > stored)
        if len(wide):
            ids = self._with_wide(row, ids, stored, wide)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        # A copy: the pool of all rows is not to live as long as this mask.
        return SamplingMask(ids.copy(), offsets)

    def logprobs(self, row: int) -> RowLogprobs:
        """Log-probabilities of a row's new tokens; they must have been asked for."""
        values, ranks, top_ids, top_values = self._logprobs
        tokens = (row, slice(int(self.counts[row])))
        return RowLogprobs(values[tokens], ranks[tokens], top_ids[tokens], top_values[tokens])

    def _fetch(self, leaf: Array) -> np.ndarray:
        self.num_bytes += leaf.nbytes
        return np.asarray(leaf)

    @functools.cached_property
    def _sizes(self) -> Int[np.ndarray, "B K"]:
        return self._fetch(self._report.sizes)

    @functools.cached_property
    def _stored(self) -> Int[np.ndarray, "B K"]:
        """Ids of each token that lie in the pool."""
        width = sum(map(len, self._report.pool)) // self._sizes.size
        return np.where(self._sizes <= width, self._sizes, 0)

    @functools.cached_property
    def _row_begins(self) -> Int[np.ndarray, " B"]:
        per_row = self._stored.sum(axis=1)
        return np.cumsum(per_row) - per_row

    @functools.cached_property
    def _ids(self) -> Int[np.ndarray, " N"]:
        self.num_ids = int(self._stored.sum())
        segments, begin = [np.zeros(0, np.int32)], 0
        for segment in self._report.pool:
            if begin >= self.num_ids:
                break
            segments.append(self._fetch(segment))
            begin += len(segment)
        return np.concatenate(segments)[: self.num_ids]

    @functools.cached_property
    def _logprobs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        report = self._report
        assert report.ranks is not None
        assert report.top is not None
        leaves = (report.logprobs, report.ranks, report.top.token_ids, report.top.logprobs)
        values, ranks, top_ids, top_values = map(self._fetch, leaves)
        return values, ranks, top_ids, top_values

    def _with_wide(self, row: int, ids: np.ndarray, stored: np.ndarray, wide: np.ndarray) -> np.ndarray:
        pieces = np.split(ids, np.cumsum(stored)[:-1])
        for token, kept in zip(wide.tolist(), self._wide_supports(row, wide), strict=True):
            pieces[token] = kept
        return np.concatenate(pieces)

    def _wide_supports(self, row: int, tokens: np.ndarray) -> Iterator[np.ndarray]:
        packed = self._report.packed
        assert packed is not None
        for begin in range(0, len(tokens), _ROWS_OF_BITS):
            some = tokens[begin : begin + _ROWS_OF_BITS]
            index: np.ndarray = np.zeros(_ROWS_OF_BITS, np.int32)
            index[: len(some)] = some
            rows = self._fetch(_bits_of(packed, jnp.int32(row), jnp.asarray(index)))
            for bits in rows[: len(some)]:
                yield np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.int32)


@jax.jit
def _bits_of(packed: UInt[Array, "B K P"], row: Int[Array, ""], tokens: Int[Array, " R"]) -> UInt[Array, "R P"]:
    return packed[row][tokens]


def _pool(support: Support) -> tuple[Int[Array, " _"], ...]:
    num_tokens, width = support.counts.size, support.width
    sizes = jnp.where(support.counts <= width, support.counts, 0).reshape(-1)
    begins = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    cells = jnp.arange(width, dtype=jnp.int32)[None, :]
    targets = jnp.where(cells < sizes[:, None], begins[:, None] + cells, num_tokens * width)
    pool = jnp.full(num_tokens * width, support.vocab_size, jnp.int32)
    pool = pool.at[targets.reshape(-1)].set(support.token_ids.reshape(-1), mode="drop")
    ends = [num_tokens << power for power in range(width.bit_length()) if num_tokens << power < num_tokens * width]
    return tuple(pool[begin:end] for begin, end in itertools.pairwise([0, *ends, num_tokens * width]))
