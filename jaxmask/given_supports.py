"""Supports of completion tokens as another engine sent them, on the host: lists or compressed sparse rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Integer

from jaxmask import ragged
from jaxmask.completions import Tokens, as_list
from jaxmask.params import SamplingParams, check_count
from jaxmask.support import Support

_MAX_IDS_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class GivenSupports:
    """The supports that came with the tokens.

    Attributes:
      is_given: which tokens have one, be it empty.
      take: ids of the supports of the tokens it is asked for, one after another, and the size of each. Only these are
        looked at.
    """

    is_given: Bool[np.ndarray, " N"]
    take: Callable[[Bool[np.ndarray, " N"]], tuple[Integer[np.ndarray, " nnz"], Int[np.ndarray, " K"]]]

    @classmethod
    def from_lists(
        cls, tokens: Tokens, supports: Sequence[Sequence[Sequence[int] | None] | None], vocab_size: int
    ) -> GivenSupports:
        """One list or None per token, or None for a whole row; raises ValueError for other numbers of them."""
        lengths = tokens.lengths.tolist()
        entries = tokens.entries(
            "supports",
            # Rows too many are refused there.
            [
                [None] * lengths[row] if values is None and row < len(lengths) else values
                for row, values in enumerate(as_list("supports", supports))
            ],
        )

        def take(is_asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            asked = np.flatnonzero(is_asked).tolist()
            lists = [entries[token] for token in asked]
            return ragged.flatten(lists, vocab_size, name=lambda place: tokens.name(asked[place]))

        return cls(np.array([entry is not None for entry in entries], np.bool_), take)

    @classmethod
    def from_csr(
        cls,
        tokens: Tokens,
        token_ids: Integer[np.ndarray, " nnz"] | Sequence[int],
        offsets: Integer[np.ndarray, " N_plus_1"] | Sequence[int] | None,
        counts: Integer[np.ndarray, " N"] | Sequence[int] | None,
    ) -> GivenSupports:
        """Sparse rows, one per token, by offsets or by counts; an empty one means that there is none.

        Raises:
          ValueError: not one of the two, or such as do not cut the ids into one row per token.
        """
        ids = ragged.integer_array("token_ids", token_ids)
        if offsets is not None and counts is None:
            lengths = ragged.row_lengths(ragged.integer_array("offsets", offsets), len(ids))
        elif counts is not None and offsets is None:
            lengths = ragged.integer_array("counts", counts)
        else:
            raise ValueError("supports need exactly one of offsets and counts.")
        if len(lengths) != len(tokens.ids):
            raise ValueError(
                f"supports must be as many as the completions have tokens, {len(tokens.ids)}, got {len(lengths)}."
            )
        is_outside = (lengths < 0) | (lengths > len(ids))
        tokens.refuse(is_outside, lambda token: f"count must be in [0, {len(ids)}], got {lengths[token]}.")
        sizes = lengths.astype(np.int64)
        if sizes.sum() != len(ids):
            raise ValueError(f"counts must sum to the number of token_ids, {len(ids)}, got {sizes.sum()}.")
        return cls(sizes > 0, lambda is_asked: (ids[np.repeat(is_asked, sizes)], sizes[is_asked]))

    def check_given(self, tokens: Tokens, trains: Bool[np.ndarray, " N"]) -> None:
        """Raises ValueError where a token trains without a support."""
        tokens.refuse(trains & ~self.is_given, lambda token: "the token trains, but its support is missing.")

    def to_support(
        self,
        tokens: Tokens,
        trains: Bool[np.ndarray, " N"],
        requests: Sequence[SamplingParams],
        length: int,
        vocab_size: int,
        width: int | None,
    ) -> Support:
        """The supports [B, T] of the tokens that train, empty elsewhere.

        Args:
          tokens: all of them.
          trains: which of them train.
          requests: the settings of each row.
          length: T.
          vocab_size: number of ids, V.
          width: compact cells, W; None takes the longest support.

        Raises:
          ValueError: a token that trains with an empty support, with one that holds an id outside [0, V)
            or twice, or one that the row may not draw, or with one that lacks the sampled id. The token is named.
        """
        width = None if width is None else check_count("width", width)
        ids, sizes = self.take(trains)
        counts = np.zeros(len(tokens.ids), np.int64)
        counts[trains] = sizes
        tokens.refuse(trains & (counts == 0), lambda token: "the token trains, but its support is empty.")

        def name(cell: int) -> str:
            return f"{tokens.label} {cell // length}, position {cell % length}"

        dense = tokens.padded(counts, trains, 0, length).reshape(-1)
        cells, dense, packed = ragged.to_cells(ids, dense, vocab_size, width, name)
        owner = np.repeat(np.flatnonzero(trains), sizes)
        _check_sampled(tokens, trains, ids.astype(np.int64), owner)
        _check_allowed(tokens, ids.astype(np.int64), owner, requests)
        # Shaped before JAX sees them: there, each new shape is compiled for.
        shape = (len(tokens.lengths), length)
        bits = None if packed is None else jnp.asarray(packed.reshape(*shape, -1))
        return Support(
            jnp.asarray(cells.reshape(*shape, cells.shape[1])), jnp.asarray(dense.reshape(shape)), bits, vocab_size
        )


def _check_sampled(
    tokens: Tokens, trains: Bool[np.ndarray, " N"], ids: Int[np.ndarray, " nnz"], owner: Int[np.ndarray, " nnz"]
) -> None:
    is_sampled = ids == tokens.ids[owner]
    has_sampled = np.bincount(owner[is_sampled], minlength=len(tokens.ids)) > 0

    def text(token: int) -> str:
        support = np.sort(ids[owner == token]).tolist()
        shown = ", ".join(map(str, support[:_MAX_IDS_SHOWN])) + (", ..." if len(support) > _MAX_IDS_SHOWN else "")
        return f"sampled id {tokens.ids[token]} lies outside its support [{shown}]."

    tokens.refuse(trains & ~has_sampled, text)


def _check_allowed(
    tokens: Tokens, ids: Int[np.ndarray, " nnz"], owner: Int[np.ndarray, " nnz"], requests: Sequence[SamplingParams]
) -> None:
    for row, request in enumerate(requests):
        if request.allowed_token_ids is None:
            continue
        cells = np.flatnonzero(tokens.rows[owner] == row)
        is_wrong = ~np.isin(ids[cells], request.allowed_token_ids)
        if is_wrong.any():
            cell = cells[is_wrong.argmax()]
            raise ValueError(f"{tokens.name(owner[cell])}: id {ids[cell]} of the support is none of allowed_token_ids.")
