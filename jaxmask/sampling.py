"""Logits to a token, its log-probability and its support: one compiled program for every setting of every row.

Rows that a few leading tokens decide go through these few columns together (`by_columns`). The others (a wide nucleus,
no filter at all, too many ties) go one by one through an exact search over the whole row (`by_rows`), so a batch pays
only for the rows that need it.

On a mesh, rows and vocabulary may be sharded: each device offers its candidates, and logits stay where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxmask import by_rows, edits, filters, logprobs, mass, placement
from jaxmask.batch import SamplingBatch
from jaxmask.checks import check_num_logprobs
from jaxmask.drawn import Plan, Sample
from jaxmask.history import History
from jaxmask.kernels import dispatch
from jaxmask.kernels.filter import api as filter_kernel
from jaxmask.params import check_count, check_integer, check_logprobs_mode
from jaxmask.placement import Placement
from jaxmask.shards import Slice
from jaxmask.support import Support


def sample(
    logits: Float[Array, "B V"],
    batch: SamplingBatch,
    *,
    step: int | Int[Array, ""] | Int[Array, " B"],
    history: History | None = None,
    width: int,
    logprobs_mode: str = "processed_logprobs",
    num_logprobs: int | None = None,
    return_support_logprobs: bool = False,
    sharding: NamedSharding | PartitionSpec | None = None,
    implementation: str = "auto",
) -> Sample:
    """Draws one token per row from its truncated distribution, and returns that distribution's support.

    Edits -> temperature -> min-p -> top-k -> top-p -> argmax of z + Gumbel noise over the survivors.

    A row's result does not depend on the other rows, on `width` or on how the logits are sharded.

    Args:
      logits: any float dtype; columns at or past `batch.vocab_size` (a padded head) are never drawn.
      batch: the rows' settings.
      step: number of tokens each row has generated so far; one number for all rows, or one each.
      history: prompt and output so far; needed only where `batch.needs_history`.
      width: compact cells per support, W. Packed bits are returned beside them unless `batch.support_bound`, or outside
        of jit the values of top_k, show that no support can be wider.
      logprobs_mode: raw_logits, raw_logprobs, processed_logits or processed_logprobs.
      num_logprobs: report each token's rank and the top `num_logprobs` tokens, 0 to min(V, 4096); None for neither.
      return_support_logprobs: report the log-probability of every id in the compact cells.
      sharding: how `logits` are cut over a mesh, rows and vocabulary: a `NamedSharding`, or a `PartitionSpec` for the
        mesh in context. Not needed outside of jit, where arrays show it. Inside `shard_map`, where `logits` are a
        device's own piece, name the axis of the vocabulary: `PartitionSpec(None, "tensor")`; the other arguments are
        those of the device's rows, and the `shard_map` must be made with `check_vma=False`. Rows and columns need not
        divide evenly.
      implementation: "pallas_gpu", "xla", "interpret" or "auto": the kernels on NVIDIA GPUs, plain XLA elsewhere (see
        `kernels.dispatch`). Rows whose leading tokens do not decide them take the plain path in either.

    Raises:
      ValueError: shapes do not fit, an unknown mode, a number out of its range, a history that is needed and missing,
        or a sharding that the mesh does not have.
      NotImplementedError: the kernels were asked for and cannot do this.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1; the order of the filters is vLLM's.
    """
    check_logprobs_mode(logprobs_mode)
    _check_types(logits, batch, step)
    width = check_count("width", width)
    placed = placement.resolve(logits, sharding)
    is_piece = placed is not None and placed.mesh is None
    part = placed.part(logits.shape[1]) if placed is not None and is_piece else Slice(batch.vocab_size)
    _check_shapes(logits, batch, part.num if is_piece else 1)
    if num_logprobs is not None:
        num_logprobs = check_num_logprobs(num_logprobs, batch.vocab_size, "None or an integer")
    _check_history(history, batch)
    steps = jnp.broadcast_to(jnp.asarray(step, jnp.int32), (batch.num_rows,))
    batch = with_support_bound(batch, width)
    plan = Plan(width, needs_bits(batch, width), logprobs_mode, num_logprobs, return_support_logprobs, part)
    is_cut = placed is not None and placed.num_slices > 1
    refusal = filter_kernel.refusal(logits, plan, is_cut)
    mesh = None if placed is None else placed.mesh
    chosen = dispatch.choose("sample", implementation, logits, refusal, mesh)
    plan = dataclasses.replace(plan, implementation=chosen)
    history = history if batch.needs_history else None
    if placed is None or is_piece:
        return _sample(logits, batch, steps, history, plan)
    return _sample_placed(logits, batch, steps, history, plan, placed)


def with_support_bound(batch: SamplingBatch, width: int) -> SamplingBatch:
    """The batch, with the promise that supports fit `width` where its values are known and show it."""
    if batch.support_bound is not None or isinstance(batch.top_k, jax.core.Tracer):
        return batch
    returned = True if batch.returns_support is None else np.asarray(batch.returns_support)
    fits = np.all((np.asarray(batch.top_k) <= width) | ~np.asarray(returned))
    # Only two values of this static field can come from here, so settings that change rarely recompile.
    return dataclasses.replace(batch, support_bound=width) if fits else batch


def needs_bits(batch: SamplingBatch, width: int) -> bool:
    """Whether a support of this batch may not fit `width` cells."""
    bound = batch.vocab_size if batch.support_bound is None else min(batch.support_bound, batch.vocab_size)
    return width < bound


@functools.partial(jax.jit, static_argnames=("plan", "placed"))
def _sample_placed(
    logits: Float[Array, "B V"],
    batch: SamplingBatch,
    steps: Int[Array, " B"],
    history: History | None,
    plan: Plan,
    placed: Placement,
) -> Sample:
    """`_sample` of each device's piece of the logits."""
    num_rows = logits.shape[0]
    rows = PartitionSpec(placed.batch_axes or None)
    logits_spec = PartitionSpec(placed.batch_axes or None, placed.vocab_axes or None)
    on_mesh = functools.partial(NamedSharding, placed.mesh)
    settings = (batch, steps, history)
    if placed.is_explicit:
        settings = jax.sharding.reshard(settings, on_mesh(PartitionSpec()))
    missing_rows, missing_columns = -num_rows % placed.num_row_blocks, -logits.shape[1] % placed.num_slices
    if missing_rows or missing_columns:
        # Rows without a finite logit are the cheapest to sample.
        logits = jnp.pad(logits, ((0, missing_rows), (0, missing_columns)), constant_values=-jnp.inf)
        row = jnp.minimum(jnp.arange(num_rows + missing_rows, dtype=jnp.int32), num_rows - 1)
        settings = jax.tree.map(lambda leaf: leaf[row], settings)
    if placed.is_explicit:
        logits, settings = jax.sharding.reshard((logits, settings), (on_mesh(logits_spec), on_mesh(rows)))
    part = placed.part(logits.shape[1] // placed.num_slices)

    def sample_piece(logits: Array, settings: tuple[SamplingBatch, Array, History | None]) -> Sample:
        batch, steps, history = settings
        return _sample(logits, batch, steps, history, dataclasses.replace(plan, part=part))

    drawn = jax.shard_map(
        sample_piece,
        mesh=placed.mesh,
        in_specs=(logits_spec, rows),
        out_specs=rows,
        # Slices agree on what they drew by collectives; the checker cannot see that of loops and conditions.
        check_vma=False,
    )(logits, settings)
    return jax.tree.map(lambda leaf: leaf[:num_rows], drawn)


@functools.partial(jax.jit, static_argnames="plan")
def _sample(
    logits: Float[Array, "B V"],
    batch: SamplingBatch,
    steps: Int[Array, " B"],
    history: History | None,
    plan: Plan,
) -> Sample:
    part = plan.part
    if part.is_whole:
        # Columns of a padded head are cut off where they are read: here, that would copy all the logits.
        part = Slice(batch.vocab_size)
    elif part.num * part.size > batch.vocab_size:
        logits = jnp.where(part.token_ids() < batch.vocab_size, logits, -jnp.inf)
    plan = dataclasses.replace(plan, part=part)
    terms = edits.EditTerms.for_vocabulary(batch, history, steps, part)
    # Without edits the logits are read where they lie: a cleaned copy of [B, V] would cost more than the sampling.
    is_edited = jax.tree.leaves(terms) != []
    edited = edits.apply_edits(filters.drawable(logits[:, : part.size]), terms, batch) if is_edited else logits
    drawn, is_decided = filter_kernel.draw(edited, batch, steps, plan)
    drawn = by_rows.redraw(drawn, ~is_decided, edited, batch, steps, plan)
    drawn = logprobs.reported(drawn, logits, edited, batch, plan)
    return _without_invalid(_without_opted_out(drawn, batch))


def _without_opted_out(drawn: Sample, batch: SamplingBatch) -> Sample:
    if batch.returns_support is None:
        return drawn
    returned, support = batch.returns_support, drawn.support
    support = Support(
        jnp.where(returned[:, None], support.token_ids, batch.vocab_size),
        jnp.where(returned, support.counts, 0),
        None if support.packed is None else jnp.where(returned[:, None], support.packed, jnp.uint8(0)),
        batch.vocab_size,
    )
    values = drawn.support_logprobs
    values = None if values is None else jnp.where(returned[:, None], values, -jnp.inf)
    return dataclasses.replace(drawn, support=support, support_logprobs=values)


def _without_invalid(drawn: Sample) -> Sample:
    ranks = drawn.ranks if drawn.ranks is None else jnp.where(drawn.is_valid, drawn.ranks, 0)
    return dataclasses.replace(drawn, logprobs=jnp.where(drawn.is_valid, drawn.logprobs, -jnp.inf), ranks=ranks)


def _check_shapes(logits: Float[Array, "B V"], batch: SamplingBatch, num_slices: int) -> None:
    if batch.vocab_size > mass.MAX_TERMS:
        raise ValueError(f"vocab_size must be at most {mass.MAX_TERMS}, got {batch.vocab_size}.")
    if logits.ndim != 2 or logits.shape[0] != batch.num_rows or logits.shape[1] * num_slices < batch.vocab_size:
        pieces = f" in {num_slices} slices" if num_slices > 1 else ""
        raise ValueError(
            f"logits must be [{batch.num_rows}, at least {batch.vocab_size}{pieces}] to fit the batch, got "
            f"{logits.shape}."
        )


def _check_types(logits: Any, batch: Any, step: Any) -> None:
    if not isinstance(batch, SamplingBatch):
        raise ValueError(f"batch must be a SamplingBatch, got {type(batch).__name__}.")
    if not isinstance(logits, jax.Array | np.ndarray) or not jnp.issubdtype(logits.dtype, jnp.floating):
        found = logits.dtype if hasattr(logits, "dtype") else type(logits).__name__
        raise ValueError(f"logits must be an array of floating-point numbers, got {found}.")
    if isinstance(step, jax.Array | np.ndarray):
        if not jnp.issubdtype(step.dtype, jnp.integer):
            raise ValueError(f"step must be integers, got {step.dtype}.")
    elif check_integer("step", step) < 0:
        raise ValueError(f"step must be at least 0, got {step}.")


def _check_history(history: History | None, batch: SamplingBatch) -> None:
    if not batch.needs_history:
        return
    if history is None:
        raise ValueError(
            "history is None, but a penalty or bad word of the batch needs it: make one with History.start or "
            "History.from_lists, and append each drawn token."
        )
    history.check_fits(batch)
