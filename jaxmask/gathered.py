"""Logits of kept ids alone: the LM head's rows are gathered where supports point to them.

Cost follows the ids that are there, not the cells that could hold some, and not the vocabulary: cells are taken in
blocks, as many as needed. Supports of one id are left out: whatever their logit is, its probability is 1.
"""

from __future__ import annotations

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

    Differentiable in `hidden` and `head`, with sums in float32. What lies in rows and cells that are left out, NaN
    included, changes nothing and gets no gradient.

    Args:
      hidden: one state per row, any float dtype.
      head: rows of the LM head.
      token_ids: ids in [0, U) in the first `counts` cells of each row.
      counts: at most W.
    """
    return _forward(hidden, head, token_ids, counts)[0]


def _forward(
    hidden: Array, head: Array, token_ids: Array, counts: Array
) -> tuple[Float[Array, "N W"], tuple[Array, ...]]:
    num_rows, width = token_ids.shape

    def add_block(block: Array, kept: Array) -> Array:
        rows, cells, is_used = _cells(counts, block)
        products = _rows(hidden, rows) * _rows(head, jnp.where(is_used, token_ids[rows, cells], 0))
        # As a product with ones: this sum is vectorised, and `sum` over a row of a gather is not.
        values = jnp.dot(products, jnp.ones(products.shape[1]), precision=jax.lax.Precision.HIGHEST)
        return kept.at[jnp.where(is_used, rows, num_rows), cells].set(values, mode="drop")

    kept = jax.lax.fori_loop(0, _num_blocks(counts), add_block, jnp.zeros((num_rows, width)))
    return kept, (hidden, head, token_ids, counts)


def _backward(
    residuals: tuple[Array, Array, Array, Array], d_kept: Float[Array, "N W"]
) -> tuple[Array, Array, None, None]:
    hidden, head, token_ids, counts = residuals

    def add_block(block: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = sums
        rows, cells, is_used = _cells(counts, block)
        ids = jnp.where(is_used, token_ids[rows, cells], 0)
        weights = jnp.where(is_used, d_kept[rows, cells], 0.0)[:, None]
        # Tokens that are not trained on have no weight, and their states may hold anything: 0 x NaN is NaN.
        is_moved = weights != 0
        to_hidden = jnp.where(is_moved, weights * _rows(head, ids), 0.0)
        to_head = jnp.where(is_moved, weights * _rows(hidden, rows), 0.0)
        d_hidden = d_hidden.at[rows].add(to_hidden, indices_are_sorted=True)
        return d_hidden, d_head.at[ids].add(to_head)

    # Sums are float32 whatever the dtypes.
    zeros = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32))
    d_hidden, d_head = jax.lax.fori_loop(0, _num_blocks(counts), add_block, zeros)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None, None


kept_logits.defvjp(_forward, _backward)


def _num_scored(counts: Int[Array, " N"]) -> Int[Array, " N"]:
    return jnp.where(counts > 1, counts, 0)


def _num_blocks(counts: Int[Array, " N"]) -> Int[Array, ""]:
    return (_num_scored(counts).sum(dtype=jnp.int32) + _BLOCK - 1) // _BLOCK


def _cells(
    counts: Int[Array, " N"], block: Int[Array, ""]
) -> tuple[Int[Array, " B"], Int[Array, " B"], Bool[Array, " B"]]:
    """Row and cell of each place of a block, and whether there is one: counts [3, 1, 2] give (0, 0), (0, 1), (0, 2),
    (2, 0), (2, 1)."""
    num = _num_scored(counts)
    ends = jnp.cumsum(num)
    places = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    is_used = places < ends[-1]
    rows = jnp.minimum(jnp.searchsorted(ends, places, side="right"), num.shape[0] - 1).astype(jnp.int32)
    return rows, jnp.where(is_used, places - (ends - num)[rows], 0), is_used


def _rows(table: Float[Array, "U D"], index: Int[Array, " B"]) -> Float[Array, "B D"]:
    return table.at[index].get(mode="clip").astype(jnp.float32)
