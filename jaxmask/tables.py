"""Writing to rows that have come to different places."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def put(tables: Any, cells: Any, columns: Int[Array, "B C"], counts: Int[Array, " B"]) -> Any:
    """Tables [B, T, ...] with the first counts[b] of the cells [B, C, ...] in the given columns of each row."""
    is_put = jnp.arange(columns.shape[1], dtype=jnp.int32)[None, :] < counts[:, None]

    def put_one(table: Array, values: Array) -> Array:
        targets = jnp.where(is_put, columns, table.shape[1])
        # Row by row, so that rows cut over a mesh stay where they are.
        return jax.vmap(lambda row, index, new: row.at[index].set(new, mode="drop"))(table, targets, values)

    return jax.tree.map(put_one, tables, cells)
