"""The LM head on a device mesh: every device scores its rows on the ids it owns, and small sums cross devices.

Of supports, one sum of kept columns [N, W]; of whole rows, maxima and masses. The head and the logits stay where they
are. On one device the same functions run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from jaxmask import gathered, vocabulary
from jaxmask.gathered import Cells
from jaxmask.kernels.head import api as head_kernel
from jaxmask.placement import Placement
from jaxmask.scores import RowScores
from jaxmask.shards import Slice

# (logits, reference's logits or None, the rows' arrays, shared arrays, indices of the rows, columns held here)
ScoreRows = Callable[[Array, Array | None, Any, Any, Array, Slice], RowScores]


def kept_logits(
    hidden: Float[Array, "N D"],
    head: Float[Array, "U D"],
    cells: Cells,
    placed: Placement | None,
    implementation: str,
) -> Float[Array, "N W"]:
    """`gathered.kept_logits`, by the kernel where `implementation` says so, of a head on one device or on many."""

    def score(rows: Any, heads: Any, shared: Any, part: Slice, first_row: Array) -> Array:
        hidden, cells = rows
        arrays = hidden, *heads, _owned(cells, part)
        if implementation == "xla":
            return part.total(gathered.kept_logits(*arrays))
        return part.total(head_kernel.kept_logits(*arrays, implementation=implementation))

    return _on_mesh(score, (hidden, cells), (head,), (), placed)


def row_scores(
    score: ScoreRows,
    is_chosen: Bool[Array, " N"],
    hidden: Float[Array, "N D"],
    head: Float[Array, "U D"],
    of_rows: Any,
    shared: Any,
    reference: tuple[Float[Array, "N D"], Float[Array, "U D"]] | None,
    placed: Placement | None,
) -> RowScores:
    """Scores of the chosen rows over the vocabulary, in chunks; 0 for the others (see `vocabulary.score_chosen`).

    Args:
      score: of the logits of some rows, on the columns that a device holds.
      is_chosen: rows that are scored.
      hidden: one state per row.
      head: rows of the LM head.
      of_rows: arrays with a leading axis of N, which `score` gets at the rows it is asked for.
      shared: arrays it gets whole.
      reference: hidden states and head of a reference policy; a constant.
      placed: how rows and ids are cut; None for one device.
    """

    def score_piece(rows: Any, heads: Any, shared: Any, part: Slice, first_row: Array) -> RowScores:
        is_chosen, hidden, of_rows, ref_hidden = rows

        def score_some(states: Array, head: Array, index: Array, context: Any) -> RowScores:
            of_rows, shared, first_row, ref_hidden, ref_heads = context
            ref_logits = None if ref_hidden is None else vocabulary.logits(ref_hidden[index], *ref_heads)
            mine = jax.tree.map(lambda leaf: leaf[index], of_rows)
            return score(vocabulary.logits(states, head), ref_logits, mine, shared, first_row + index, part)

        context = (of_rows, shared, first_row, ref_hidden, heads[1:])
        return vocabulary.score_chosen(score_some, is_chosen, hidden, heads[0], context)

    ref_hidden, *ref_heads = (None,) if reference is None else jax.lax.stop_gradient(reference)
    rows = (is_chosen, hidden, of_rows, ref_hidden)
    return _on_mesh(score_piece, rows, (head, *ref_heads), shared, placed)


def _on_mesh(
    piece: Callable[[Any, Any, Any, Slice, Array], Any], rows: Any, heads: Any, shared: Any, placed: Placement | None
) -> Any:
    """`piece(rows, heads, shared, columns held here, index of the first row)` of every device's part."""
    if placed is None:
        return piece(rows, heads, shared, Slice(heads[0].shape[0]), jnp.int32(0))
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    rows, heads = _padded(rows, placed.num_row_blocks), _padded(heads, placed.num_slices)
    by_rows, by_ids = PartitionSpec(placed.batch_axes or None), PartitionSpec(placed.vocab_axes or None)
    specs = by_rows, by_ids, PartitionSpec()
    if placed.is_explicit:
        on_mesh = [NamedSharding(placed.mesh, spec) for spec in specs]
        rows, heads, shared = jax.sharding.reshard((rows, heads, shared), tuple(on_mesh))
    part = placed.part(heads[0].shape[0] // placed.num_slices)
    per_block = jax.tree.leaves(rows)[0].shape[0] // placed.num_row_blocks

    def run(rows: Any, heads: Any, shared: Any) -> Any:
        block = jax.lax.axis_index(placed.batch_axes).astype(jnp.int32) if placed.batch_axes else jnp.int32(0)
        return piece(rows, heads, shared, part, block * per_block)

    # Slices agree on their sums by collectives; the checker cannot see that of loops.
    on_all = jax.shard_map(run, mesh=placed.mesh, in_specs=specs, out_specs=by_rows, check_vma=False)
    return jax.tree.map(lambda leaf: leaf[:num_rows], on_all(rows, heads, shared))


def _padded(tree: Any, multiple: int) -> Any:
    """Every leaf with zeros after its first axis, up to a multiple: rows without ids, ids without a place."""

    def pad(leaf: Array) -> Array:
        missing = -leaf.shape[0] % multiple
        return jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) if missing else leaf

    return jax.tree.map(pad, tree)


def _owned(cells: Cells, part: Slice) -> Cells:
    """Of the cells that are asked for, those whose ids this device holds, with ids counted from its first one."""
    if part.is_whole:
        return cells
    column = jnp.arange(cells.token_ids.shape[1], dtype=jnp.int32)[None, :] - cells.starts[:, None]
    is_asked = (column >= 0) & (column < cells.counts[:, None])
    ids = cells.token_ids - part.offset()
    # Ids ascend, so those of a slice lie side by side.
    before = (is_asked & (ids < 0)).sum(axis=1, dtype=jnp.int32)
    here = (is_asked & (ids >= 0) & (ids < part.size)).sum(axis=1, dtype=jnp.int32)
    return Cells(ids, cells.starts + before, here)
