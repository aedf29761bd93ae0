"""Logits of kept ids alone: the LM head's rows are gathered where supports point to them.

Cost follows the ids that are asked for, not the cells that could hold some, and not the vocabulary: cells are taken in
blocks, as many as needed.

With x_nj = hidden[n] . head[id_nj], the sum over cells of g_nj x_nj is linear in g, hidden and head. Each of the three
functions below is its derivative by one of them, and their own derivatives are the other two: reverse mode works to any
order, and forward mode is not offered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Floats of one gather, [cells of a block, D]: two of them stay in the caches of a CPU, and a GPU is kept busy.
_BLOCK_FLOATS = 2**19


class Cells(NamedTuple):
    """The cells that are asked for: starts[n] : starts[n] + counts[n] of each row, whose ids index the head's rows."""

    token_ids: Int[Array, "N W"]
    starts: Int[Array, " N"]
    counts: Int[Array, " N"]


@jax.custom_vjp
def kept_logits(hidden: Float[Array, "N D"], head: Float[Array, "U D"], cells: Cells) -> Float[Array, "N W"]:
    """hidden[n] . head[id] of each cell that is asked for, float32; 0 in the others.

    Differentiable in `hidden` and `head`, in reverse, with sums in float32. What lies in rows and cells that are left
    out, and in rows without a cotangent, NaN included, changes nothing and gets no gradient.

    Args:
      hidden: one state per row, any float dtype.
      head: rows of the LM head.
      cells: ids in [0, U).
    """
    num_rows = hidden.shape[0]

    def add(kept: Array, rows: Array, columns: Array, ids: Array, is_used: Array) -> Array:
        products = _rows(hidden, rows) * _rows(head, ids)
        # As a product with ones: this sum is vectorised, and `sum` over a row of a gather is not.
        values = jnp.dot(products, jnp.ones(products.shape[1]), precision=jax.lax.Precision.HIGHEST)
        return kept.at[jnp.where(is_used, rows, num_rows), columns].set(values, mode="drop")

    return _over_blocks(add, jnp.zeros(cells.token_ids.shape), cells, head.shape[1])


@jax.custom_vjp
def _to_hidden(weights: Float[Array, "N W"], head: Float[Array, "U D"], cells: Cells) -> Float[Array, "N D"]:
    """Sum over each row's cells of weight times head[id], float32."""

    def add(total: Array, rows: Array, columns: Array, ids: Array, is_used: Array) -> Array:
        terms = _weighted(weights, rows, columns, is_used, _rows(head, ids))
        return total.at[rows].add(terms, indices_are_sorted=True)

    return _over_blocks(add, jnp.zeros((weights.shape[0], head.shape[1])), cells, head.shape[1])


@jax.custom_vjp
def _to_head(
    weights: Float[Array, "N W"], hidden: Float[Array, "N D"], like: Float[Array, "U D"], cells: Cells
) -> Float[Array, "U D"]:
    """Sum over the cells of each id of weight times hidden[n], float32; `like` gives the shape alone."""

    def add(total: Array, rows: Array, columns: Array, ids: Array, is_used: Array) -> Array:
        return total.at[ids].add(_weighted(weights, rows, columns, is_used, _rows(hidden, rows)))

    return _over_blocks(add, jnp.zeros(like.shape), cells, like.shape[1])


def _kept_fwd(hidden: Array, head: Array, cells: Cells) -> tuple[Array, tuple[Any, ...]]:
    return kept_logits(hidden, head, cells), (hidden, head, cells)


def _kept_bwd(saved: tuple[Any, ...], g: Array) -> tuple[Array, Array, None]:
    hidden, head, cells = saved
    return _to_hidden(g, head, cells).astype(hidden.dtype), _to_head(g, hidden, head, cells).astype(head.dtype), None


def _hidden_fwd(weights: Array, head: Array, cells: Cells) -> tuple[Array, tuple[Any, ...]]:
    return _to_hidden(weights, head, cells), (weights, head, cells)


def _hidden_bwd(saved: tuple[Any, ...], g: Array) -> tuple[Array, Array, None]:
    weights, head, cells = saved
    return kept_logits(g, head, cells), _to_head(weights, g, head, cells).astype(head.dtype), None


def _head_fwd(weights: Array, hidden: Array, like: Array, cells: Cells) -> tuple[Array, tuple[Any, ...]]:
    return _to_head(weights, hidden, like, cells), (weights, hidden, like, cells)


def _head_bwd(saved: tuple[Any, ...], g: Array) -> tuple[Array, Array, Array, None]:
    weights, hidden, like, cells = saved
    to_hidden = _to_hidden(weights, g, cells).astype(hidden.dtype)
    return kept_logits(hidden, g, cells), to_hidden, jnp.zeros_like(like), None


kept_logits.defvjp(_kept_fwd, _kept_bwd)
_to_hidden.defvjp(_hidden_fwd, _hidden_bwd)
_to_head.defvjp(_head_fwd, _head_bwd)


def block_size(depth: int) -> int:
    """Cells of a block, a power of two from 64 to 1024, where rows have `depth` floats."""
    fits = max(_BLOCK_FLOATS // max(depth, 1), 1)
    return min(max(1 << (fits.bit_length() - 1), 64), 1024)


def _over_blocks(
    add: Callable[[Array, Array, Array, Array, Array], Array], start: Array, cells: Cells, depth: int
) -> Array:
    """`start` after `add(total, rows, columns, ids, is_used)` of every block."""
    token_ids, starts, counts = cells
    size = block_size(depth)
    if token_ids.size == 0:
        return start
    ends = jnp.cumsum(counts)

    def step(block: Array, total: Array) -> Array:
        rows, places, is_used = _places(counts, ends, block, size)
        columns = jnp.where(is_used, starts[rows] + places, 0)
        return add(total, rows, columns, jnp.where(is_used, token_ids[rows, columns], 0), is_used)

    return jax.lax.fori_loop(0, _num_blocks(counts, size), step, start)


def _num_blocks(counts: Int[Array, " N"], size: int) -> Int[Array, ""]:
    return (counts.sum(dtype=jnp.int32) + size - 1) // size


def _places(
    counts: Int[Array, " N"], ends: Int[Array, " N"], block: Int[Array, ""], size: int
) -> tuple[Int[Array, " B"], Int[Array, " B"], Bool[Array, " B"]]:
    """Row, and place within it, of each cell of a block, and whether there is one.

    Counts [3, 0, 2] give (0, 0), (0, 1), (0, 2), (2, 0), (2, 1); `ends` is their running sum.
    """
    indices = block * size + jnp.arange(size, dtype=jnp.int32)
    is_used = indices < ends[-1]
    rows = jnp.minimum(jnp.searchsorted(ends, indices, side="right"), counts.shape[0] - 1).astype(jnp.int32)
    return rows, indices - (ends - counts)[rows], is_used


def _weighted(weights: Array, rows: Array, columns: Array, is_used: Array, vectors: Array) -> Array:
    """weight times vector of each cell. Tokens that are not trained on have no weight, and their states may hold
    anything: 0 x NaN is NaN."""
    weight = jnp.where(is_used, weights[rows, columns], 0.0)[:, None]
    return jnp.where(weight != 0, weight * vectors, 0.0)


def _rows(table: Float[Array, "U D"], index: Int[Array, " B"]) -> Float[Array, "B D"]:
    return table.at[index].get(mode="clip").astype(jnp.float32)
