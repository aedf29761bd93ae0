"""Logits of kept ids alone: the LM head's rows are gathered where supports point to them.

Cost follows the ids that are there, not the cells that could hold some, and not the vocabulary: cells are taken in
blocks, as many as needed. Supports of one id are left out: whatever their logit is, its probability is 1.

With x_nj = hidden[n] . head[id_nj], the sum over cells of g_nj x_nj is linear in g, hidden and head. Each of the three
functions below is its derivative by one of them, and their own derivatives are the other two: reverse mode works to any
order, and forward mode is not offered.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Cells of a block: two gathers of [256, D] stay in the caches of a CPU, and keep a GPU busy for D in the thousands.
_BLOCK = 256


@jax.custom_vjp
def kept_logits(
    hidden: Float[Array, "N D"], head: Float[Array, "U D"], token_ids: Int[Array, "N W"], counts: Int[Array, " N"]
) -> Float[Array, "N W"]:
    """hidden[n] . head[id] of each row's first `counts` ids, float32; 0 in other cells and in rows of one id.

    Differentiable in `hidden` and `head`, in reverse, with sums in float32. What lies in rows and cells that are left
    out, and in rows without a cotangent, NaN included, changes nothing and gets no gradient.

    Args:
      hidden: one state per row, any float dtype.
      head: rows of the LM head.
      token_ids: ids in [0, U) in the first `counts` cells of each row.
      counts: at most W.
    """
    num_rows, width = token_ids.shape

    def add(kept: Array, rows: Array, cells: Array, ids: Array, is_used: Array) -> Array:
        products = _rows(hidden, rows) * _rows(head, ids)
        # As a product with ones: this sum is vectorised, and `sum` over a row of a gather is not.
        values = jnp.dot(products, jnp.ones(products.shape[1]), precision=jax.lax.Precision.HIGHEST)
        return kept.at[jnp.where(is_used, rows, num_rows), cells].set(values, mode="drop")

    return _over_blocks(add, jnp.zeros((num_rows, width)), token_ids, counts)


@jax.custom_vjp
def _to_hidden(
    weights: Float[Array, "N W"], head: Float[Array, "U D"], token_ids: Int[Array, "N W"], counts: Int[Array, " N"]
) -> Float[Array, "N D"]:
    """Sum over each row's cells of weight times head[id], float32."""

    def add(total: Array, rows: Array, cells: Array, ids: Array, is_used: Array) -> Array:
        terms = _weighted(weights, rows, cells, is_used, _rows(head, ids))
        return total.at[rows].add(terms, indices_are_sorted=True)

    return _over_blocks(add, jnp.zeros((token_ids.shape[0], head.shape[1])), token_ids, counts)


@jax.custom_vjp
def _to_head(
    weights: Float[Array, "N W"],
    hidden: Float[Array, "N D"],
    like: Float[Array, "U D"],
    token_ids: Int[Array, "N W"],
    counts: Int[Array, " N"],
) -> Float[Array, "U D"]:
    """Sum over the cells that hold an id of weight times hidden[n], float32; `like` gives the shape alone."""

    def add(total: Array, rows: Array, cells: Array, ids: Array, is_used: Array) -> Array:
        return total.at[ids].add(_weighted(weights, rows, cells, is_used, _rows(hidden, rows)))

    return _over_blocks(add, jnp.zeros(like.shape), token_ids, counts)


def _kept_fwd(hidden: Array, head: Array, token_ids: Array, counts: Array) -> tuple[Array, tuple[Array, ...]]:
    return kept_logits(hidden, head, token_ids, counts), (hidden, head, token_ids, counts)


def _kept_bwd(saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, None, None]:
    hidden, head, token_ids, counts = saved
    to_hidden = _to_hidden(g, head, token_ids, counts).astype(hidden.dtype)
    return to_hidden, _to_head(g, hidden, head, token_ids, counts).astype(head.dtype), None, None


def _hidden_fwd(weights: Array, head: Array, token_ids: Array, counts: Array) -> tuple[Array, tuple[Array, ...]]:
    return _to_hidden(weights, head, token_ids, counts), (weights, head, token_ids, counts)


def _hidden_bwd(saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, None, None]:
    weights, head, token_ids, counts = saved
    to_head = _to_head(weights, g, head, token_ids, counts).astype(head.dtype)
    return kept_logits(g, head, token_ids, counts), to_head, None, None


def _head_fwd(
    weights: Array, hidden: Array, like: Array, token_ids: Array, counts: Array
) -> tuple[Array, tuple[Array, ...]]:
    return _to_head(weights, hidden, like, token_ids, counts), (weights, hidden, like, token_ids, counts)


def _head_bwd(saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, Array, None, None]:
    weights, hidden, like, token_ids, counts = saved
    to_hidden = _to_hidden(weights, g, token_ids, counts).astype(hidden.dtype)
    return kept_logits(hidden, g, token_ids, counts), to_hidden, jnp.zeros_like(like), None, None


kept_logits.defvjp(_kept_fwd, _kept_bwd)
_to_hidden.defvjp(_hidden_fwd, _hidden_bwd)
_to_head.defvjp(_head_fwd, _head_bwd)


def _over_blocks(
    add: Callable[[Array, Array, Array, Array, Array], Array],
    start: Array,
    token_ids: Int[Array, "N W"],
    counts: Int[Array, " N"],
) -> Array:
    """`start` after `add(total, rows, cells, ids, is_used)` of every block."""

    num = _num_scored(counts)
    ends = jnp.cumsum(num)

    def step(block: Array, total: Array) -> Array:
        rows, cells, is_used = _cells(num, ends, block)
        return add(total, rows, cells, jnp.where(is_used, token_ids[rows, cells], 0), is_used)

    if token_ids.size == 0:
        return start
    return jax.lax.fori_loop(0, _num_blocks(counts), step, start)


def _num_scored(counts: Int[Array, " N"]) -> Int[Array, " N"]:
    return jnp.where(counts > 1, counts, 0)


def _num_blocks(counts: Int[Array, " N"]) -> Int[Array, ""]:
    return (_num_scored(counts).sum(dtype=jnp.int32) + _BLOCK - 1) // _BLOCK


def _cells(
    num: Int[Array, " N"], ends: Int[Array, " N"], block: Int[Array, ""]
) -> tuple[Int[Array, " B"], Int[Array, " B"], Bool[Array, " B"]]:
    """Row and cell of each place of a block, and whether there is one: counts [3, 1, 2] give (0, 0), (0, 1), (0, 2),
    (2, 0), (2, 1). `ends` is the running sum of `num`."""
    places = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    is_used = places < ends[-1]
    rows = jnp.minimum(jnp.searchsorted(ends, places, side="right"), num.shape[0] - 1).astype(jnp.int32)
    return rows, jnp.where(is_used, places - (ends - num)[rows], 0), is_used


def _weighted(weights: Array, rows: Array, cells: Array, is_used: Array, vectors: Array) -> Array:
    """weight times vector of each place. Tokens that are not trained on have no weight, and their states may hold
    anything: 0 x NaN is NaN."""
    weight = jnp.where(is_used, weights[rows, cells], 0.0)[:, None]
    return jnp.where(weight != 0, weight * vectors, 0.0)


def _rows(table: Float[Array, "U D"], index: Int[Array, " B"]) -> Float[Array, "B D"]:
    return table.at[index].get(mode="clip").astype(jnp.float32)
