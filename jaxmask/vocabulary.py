"""Chosen rows through the whole vocabulary, a few at a time: memory is 64 V however many there are.

For supports wider than their cells, and for scores over the full vocabulary. Rows that are not chosen cost nothing: the
number of chunks is known on the device alone. Everything is computed again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask.scores import RowScores

# Logits at once are this times V.
ROWS_PER_CHUNK = 64


def logits(hidden: Float[Array, "R D"], head: Float[Array, "C D"]) -> Float[Array, "R C"]:
    """hidden . head[v] of every row and column, float32."""
    # Highest precision: the sampler's logits must be met to rounding, also where products default to TF32.
    return jnp.einsum(
        "rd,cd->rc", hidden, head, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def score_chosen(
    score: Callable[[Array, Array, Array, Any], RowScores],
    is_chosen: Bool[Array, " N"],
    hidden: Float[Array, "N D"],
    head: Float[Array, "C D"],
    context: Any,
) -> RowScores:
    """`score(hidden of some rows, head, which rows, context)` of the chosen rows, 0 for the others.

    Differentiable in `hidden` and `head`, once and in reverse. Rows without a cotangent get no gradient, whatever they
    hold.

    Args:
      score: of up to 64 rows.
      is_chosen: rows that are scored.
      hidden: one state per row, any float dtype.
      head: rows of the LM head, or the slice that this device holds.
      context: a pytree of arrays, constants.
    """
    leaves, tree = jax.tree.flatten(context)

    def score_leaves(hidden: Array, head: Array, rows: Array, leaves: list[Any]) -> Any:
        return score(hidden, head, rows, jax.tree.unflatten(tree, leaves))

    return _over_chunks(score_leaves, hidden, head, is_chosen, leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_chunks(
    score: Callable[..., RowScores], hidden: Array, head: Array, is_chosen: Array, leaves: list[Any]
) -> RowScores:
    num_rows = hidden.shape[0]
    per_chunk = min(ROWS_PER_CHUNK, num_rows)
    like = jax.eval_shape(score, hidden[:per_chunk], head, jnp.arange(per_chunk, dtype=jnp.int32), leaves)
    totals = jax.tree.map(lambda leaf: jnp.zeros(num_rows, leaf.dtype), like)
    if num_rows == 0:
        return totals

    def step(rows: Array, target: Array, totals: RowScores) -> RowScores:
        new = score(hidden[rows], head, rows, leaves)
        return jax.tree.map(lambda total, value: total.at[target].set(value, mode="drop"), totals, new)

    return _loop(step, is_chosen, totals)


def _forward(score: Any, hidden: Array, head: Array, is_chosen: Array, leaves: list[Any]) -> tuple[Any, Any]:
    return _over_chunks(score, hidden, head, is_chosen, leaves), (hidden, head, is_chosen, leaves)


def _backward(score: Any, saved: Any, cotangents: RowScores) -> tuple[Array, Array, None, None]:
    hidden, head, is_chosen, leaves = saved
    start = jnp.zeros(hidden.shape, hidden.dtype), jnp.zeros(head.shape, jnp.float32)
    if hidden.shape[0] == 0:
        return start[0], start[1].astype(head.dtype), None, None

    def step(rows: Array, target: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = totals
        is_used = target < hidden.shape[0]
        of_rows = jax.tree.map(lambda leaf: jnp.where(is_used, leaf[rows], 0.0), cotangents)
        moves = functools.reduce(jnp.logical_or, (leaf != 0 for leaf in jax.tree.leaves(of_rows)))
        # 0 x NaN is NaN: what moves nothing is left out, and a row that moves something stands in for it.
        rows = jnp.where(moves, rows, rows[jnp.argmax(moves)])
        _, pull = jax.vjp(lambda states, head: score(states, head, rows, leaves), hidden[rows], head)
        new_hidden, new_head = pull(of_rows)
        d_head = d_head + jnp.where(moves.any(), new_head, jnp.zeros((), new_head.dtype)).astype(jnp.float32)
        return d_hidden.at[jnp.where(moves, target, hidden.shape[0])].set(new_hidden, mode="drop"), d_head

    d_hidden, d_head = _loop(step, is_chosen, start)
    return d_hidden, d_head.astype(head.dtype), None, None


_over_chunks.defvjp(_forward, _backward)


def _loop(step: Callable[[Array, Array, Any], Any], is_chosen: Bool[Array, " N"], start: Any) -> Any:
    """`start` after `step(rows, target, total)` of every chunk of chosen rows; target is N where a chunk has fewer."""
    num_rows = is_chosen.shape[0]
    size = min(ROWS_PER_CHUNK, num_rows)
    order = jnp.argsort(~is_chosen, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -num_rows % size))
    num_chosen = is_chosen.sum(dtype=jnp.int32)

    def add(chunk: Int[Array, ""], total: Any) -> Any:
        rows = jax.lax.dynamic_slice_in_dim(order, chunk * size, size)
        is_used = chunk * size + jnp.arange(size, dtype=jnp.int32) < num_chosen
        return step(rows, jnp.where(is_used, rows, num_rows), total)

    return jax.lax.fori_loop(0, (num_chosen + size - 1) // size, add, start)
