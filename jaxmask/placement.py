"""Where the rows and columns of logits lie on a device mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmask.shards import Slice


@dataclasses.dataclass(frozen=True)
class Placement:
    """Mesh axes over which logits [B, V] are cut.

    Attributes:
      mesh: a concrete or an abstract mesh; None inside `shard_map`, where each device has its own piece already.
      batch_axes: axes of the rows.
      vocab_axes: axes of the columns.
      num_row_blocks: devices along `batch_axes`.
      num_slices: devices along `vocab_axes`.
    """

    mesh: Any
    batch_axes: tuple[str, ...]
    vocab_axes: tuple[str, ...]
    num_row_blocks: int
    num_slices: int

    @property
    def is_explicit(self) -> bool:
        """Whether the types of traced arrays carry their sharding on this mesh."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    def along_rows(self, values: jax.Array) -> jax.Array:
        """Values cut like the rows, where types say how they lie: there, a choice must lie as its cases do."""
        if not self.is_explicit or values.shape[0] % self.num_row_blocks:
            return values
        return jax.sharding.reshard(values, NamedSharding(self.mesh, PartitionSpec(self.batch_axes or None)))

    def part(self, num_columns: int) -> Slice:
        """The slice of a device that holds `num_columns` columns of each row."""
        return Slice(num_columns, self.vocab_axes, self.num_slices) if self.vocab_axes else Slice(num_columns)


def resolve(logits: jax.Array, sharding: NamedSharding | PartitionSpec | None) -> Placement | None:
    """How logits are placed: as `sharding` says, or as can be seen of the array; None for one device.

    A concrete array shows its sharding, and so does a traced one on a mesh of explicit axes. Inside jit with automatic
    axes, and inside `shard_map`, the placement must be said.

    Raises:
      ValueError: more than two axes, an axis the mesh lacks, or axes of which some are manual and some are not.
    """
    sharding = _visible(logits) if sharding is None else sharding
    if sharding is None:
        return None
    context = jax.sharding.get_abstract_mesh()
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else context
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if len(spec) > 2:
        raise ValueError(f"sharding of logits must name the axes of rows and columns, got {spec}.")
    batch_axes, vocab_axes = (_names(part) for part in (*spec, None, None)[:2])
    sizes = dict(mesh.shape)
    missing = [axis for axis in (*batch_axes, *vocab_axes) if axis not in sizes]
    if missing:
        raise ValueError(f"sharding of logits names mesh axes {missing}; the mesh has {list(sizes)}.")
    manual = set(context.manual_axes)
    is_manual = [axis in manual for axis in (*batch_axes, *vocab_axes)]
    if any(is_manual) and not all(is_manual):
        raise ValueError(
            f"sharding {spec} of logits names axes of which some are manual (inside shard_map) and some are not: name "
            f"only the manual ones there, {sorted(manual)}."
        )
    counts = [math.prod(sizes[axis] for axis in axes) for axes in (batch_axes, vocab_axes)]
    placed = Placement(None if any(is_manual) else mesh, batch_axes, vocab_axes, *counts)
    # Types that carry a sharding have to be met also where one device holds all of an array.
    return placed if math.prod(counts) > 1 or placed.is_explicit else None


def resolve_head(
    hidden: jax.Array, head: jax.Array, sharding: NamedSharding | PartitionSpec | None
) -> Placement | None:
    """How the logits of hidden states [*B, D] and an LM head [V, D] are cut; None for one device.

    As `sharding` of the logits says, or as can be seen: rows like the first axis of `hidden`, ids like that of `head`.
    A head that is cut along an axis of the rows is gathered, as sharded parameters are.

    Raises:
      ValueError: as in `resolve`.
      NotImplementedError: the axes are manual (inside `shard_map`).
    """
    if sharding is None:
        of_rows, of_ids = _visible(hidden), _visible(head)
        seen = of_ids or of_rows
        if seen is None:
            return None
        rows, ids = (_names(part.spec[0]) if part is not None and part.spec else () for part in (of_rows, of_ids))
        sharding = NamedSharding(seen.mesh, PartitionSpec(rows or None, tuple(a for a in ids if a not in rows) or None))
    placed = resolve(head, sharding)
    if placed is not None and placed.mesh is None:
        raise NotImplementedError(
            f"sharding {sharding} names manual axes: inside shard_map the learner's head runs on a device's own rows "
            f"and a whole head alone; call it outside, with the sharding of the whole arrays."
        )
    return placed


def _visible(logits: jax.Array) -> NamedSharding | None:
    sharding = jax.typeof(logits).sharding if isinstance(logits, jax.core.Tracer) else getattr(logits, "sharding", None)
    # Inside shard_map arrays are pieces: what the context says of the whole is not theirs.
    if not isinstance(sharding, NamedSharding) or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return sharding if is_explicit or any(part for part in sharding.spec) else None


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)
