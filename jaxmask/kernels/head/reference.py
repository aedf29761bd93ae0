"""The gathered head in plain JAX: the oracle of the kernels, and the path of every platform without one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask.filters import LOWEST
from jaxmask.scores import WEIGHTLESS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadScores:
    """What the head says about each row's ids.

    Attributes:
      kept_logits: hidden[n] . head[id] of each flat cell, before temperature; exactly 0 in cells no row owns.
      logprobs: of the drawn id among the row's ids; -inf where it is not one of them.
      entropy: of the softmax over the row's ids, in nats; 0 in rows without ids.
    """

    kept_logits: Float[Array, " M"]
    logprobs: Float[Array, " N"]
    entropy: Float[Array, " N"]


@jax.jit
def gathered_head(
    hidden: Float[Array, "N D"],
    head: Float[Array, "U D"],
    token_ids: Int[Array, " M"],
    starts: Int[Array, " N"],
    counts: Int[Array, " N"],
    drawn_ids: Int[Array, " N"],
    factor: Float[Array, " N"],
) -> HeadScores:
    """Logits, log-probability and entropy over the ids of each row, by sums over segments of the flat cells.

    Args:
      hidden: one row per token.
      head: rows of the LM head.
      token_ids: ids of all rows, flat.
      starts: the first cell of each row, ascending.
      counts: cells of each row; rows do not overlap.
      drawn_ids: the id each row is scored for.
      factor: 1 / T of each row.
    """
    num_rows = starts.shape[0]
    if num_rows == 0:
        return HeadScores(jnp.zeros(token_ids.shape, jnp.float32), factor, factor)
    rows, is_owned = _rows_of_cells(token_ids.shape[0], starts, counts)
    # Whatever lies in cells nobody owns, and in rows without ids, leaves before any arithmetic: 0 x NaN is NaN.
    safe_ids = jnp.where(is_owned, token_ids, 0)
    hidden_cells = jnp.where(is_owned[:, None], hidden.astype(jnp.float32)[rows], 0.0)
    head_cells = jnp.where(is_owned[:, None], head.astype(jnp.float32).at[safe_ids].get(mode="clip"), 0.0)
    kept_logits = (hidden_cells * head_cells).sum(axis=1)

    def total(values: Float[Array, " M"]) -> Float[Array, " N"]:
        return jax.ops.segment_sum(jnp.where(is_owned, values, 0.0), rows, num_rows, indices_are_sorted=True)

    largest = jax.ops.segment_max(
        jax.lax.stop_gradient(jnp.where(is_owned, kept_logits, -jnp.inf)), rows, num_rows, indices_are_sorted=True
    )
    top = jnp.where(jnp.isfinite(largest), largest, 0.0)
    # The clamp keeps what the difference of two huge logits makes of it finite.
    z = jnp.maximum((kept_logits - top[rows]) * factor[rows], LOWEST)
    z = jnp.where(is_owned, z, 0.0)
    weights = jnp.exp(z)
    mass = total(weights)
    mass = jnp.where(mass == 0, 1.0, mass)
    log_mass = jnp.log(mass)
    # H = log mass - sum_v p_v z_v; without the bound, 0 x z overflows in the derivative of the product.
    entropy = log_mass - total(weights * jnp.maximum(z, WEIGHTLESS)) / mass
    is_drawn = is_owned & (token_ids == drawn_ids[rows])
    is_found = jax.ops.segment_max(is_drawn.astype(jnp.int32), rows, num_rows, indices_are_sorted=True) > 0
    logprobs = total(jnp.where(is_drawn, z, 0.0)) - log_mass
    return HeadScores(kept_logits, jnp.where(is_found, logprobs, -jnp.inf), entropy)


def _rows_of_cells(
    num_cells: int, starts: Int[Array, " N"], counts: Int[Array, " N"]
) -> tuple[Int[Array, " M"], Bool[Array, " M"]]:
    """The row of each cell, ascending, and whether it is that row's own: starts [1, 4], counts [2, 1], six cells.

    Out: rows [0, 0, 0, 1, 1, 1], owned [0, 1, 1, 0, 1, 0].
    """
    cells = jnp.arange(num_cells, dtype=jnp.int32)
    # By ends, not starts: a row without ids may share its start with the row that owns the cell.
    ends = jax.lax.cummax(starts + counts)
    rows = jnp.searchsorted(ends, cells, side="right", method="scan_unrolled").astype(jnp.int32)
    rows = jnp.minimum(rows, starts.shape[0] - 1)
    return rows, (cells >= starts[rows]) & (cells < starts[rows] + counts[rows])
