"""Logits to a token, its log-probability and its support: one compiled program for every setting of every row.

Rows bounded by top-k go through a few columns in canonical order. The others (no top-k, too many ties) go one by one
through an exact search over the whole row, so a batch pays only for the rows that need it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmask import bisection, bits, candidates, draw, edits, filters, logprobs
from jaxmask.batch import SamplingBatch
from jaxmask.params import check_logprobs_mode
from jaxmask.support import Support


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sample:
    """One drawn token per row.

    Attributes:
      token_ids: in [0, vocab_size).
      logprobs: of the token, as the mode says; over the support in `processed_logprobs`.
      support: the ids the token was drawn from.
      is_valid: False where the row had no finite logit: its token means nothing and its log-probability is -inf.
    """

    token_ids: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    support: Support
    is_valid: Bool[Array, " B"]


def sample(
    logits: Float[Array, "B V"],
    batch: SamplingBatch,
    *,
    step: int | Int[Array, ""] | Int[Array, " B"],
    history: edits.History | None = None,
    width: int,
    logprobs_mode: str = "processed_logprobs",
) -> Sample:
    """Draws one token per row from its truncated distribution, and returns that distribution's support.

    Edits -> temperature -> min-p -> top-k -> top-p -> argmax of z + Gumbel noise over the survivors.

    Args:
      logits: any float dtype; columns at or past `batch.vocab_size` (a padded head) are never drawn.
      batch: the rows' settings.
      step: number of tokens each row has generated so far; one number for all rows, or one each.
      history: prompt and output so far; needed only where `batch.needs_history`.
      width: compact cells per support, W. Packed bits are returned beside them unless `batch.support_bound`, or outside
        of jit the values of top_k, show that no support can be wider.
      logprobs_mode: raw_logits, raw_logprobs, processed_logits or processed_logprobs.

    Raises:
      ValueError: shapes do not fit, an unknown mode, or a history that is needed and missing.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1; the order of the filters is vLLM's.
    """
    check_logprobs_mode(logprobs_mode)
    _check_shapes(logits, batch, width)
    if batch.needs_history and history is None:
        raise ValueError(
            "history is None, but a penalty or bad word of the batch needs it: make one with History.start or "
            "History.from_lists, and append each drawn token."
        )
    steps = jnp.broadcast_to(jnp.asarray(step, jnp.int32), (batch.num_rows,))
    batch = with_support_bound(batch, width)
    return _sample(logits, batch, steps, history if batch.needs_history else None, width, logprobs_mode)


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


@functools.partial(jax.jit, static_argnames=("width", "logprobs_mode"))
def _sample(
    logits: Float[Array, "B V"],
    batch: SamplingBatch,
    steps: Int[Array, " B"],
    history: edits.History | None,
    width: int,
    logprobs_mode: str,
) -> Sample:
    logits = logits[:, : batch.vocab_size]
    terms = edits.EditTerms.for_vocabulary(batch, history, steps)
    # Without edits the logits are read where they lie: a cleaned copy of [B, V] would cost more than the sampling.
    is_edited = jax.tree.leaves(terms) != []
    edited = edits.apply_edits(filters.drawable(logits), terms, batch) if is_edited else logits
    drawn = _draw(edited, batch, steps, width)
    values = logprobs.reported_values(
        logprobs_mode,
        raw_logits=logits,
        edited=edited,
        processed_logprobs=drawn.logprobs,
        token_ids=drawn.token_ids,
        temperature=batch.temperature,
    )
    return dataclasses.replace(
        drawn,
        logprobs=jnp.where(drawn.is_valid, values, -jnp.inf),
        support=_without_opted_out(drawn.support, batch),
    )


def _draw(edited: Float[Array, "B V"], batch: SamplingBatch, steps: Int[Array, " B"], width: int) -> Sample:
    num_columns = candidates.num_columns(width, batch.vocab_size)
    columns = candidates.leading_columns(edited, batch.top_k, num_columns)
    drawn = _draw_from_columns(columns, batch, steps, width)
    if num_columns == batch.vocab_size:
        return drawn
    return _redraw_rows(drawn, ~columns.is_complete, edited, batch, steps, width)


def _draw_from_columns(
    columns: candidates.Columns, batch: SamplingBatch, steps: Int[Array, " B"], width: int
) -> Sample:
    z = filters.temper(columns.logits, columns.logits[:, 0], batch.temperature)
    counts = filters.kept_length(z, batch.min_p, batch.top_k, batch.top_p)
    is_kept = filters.is_prefix(z, counts)
    token_ids, logprob = _winner(z, is_kept, columns.token_ids, batch, steps)
    kept_ids = jnp.sort(jnp.where(is_kept, columns.token_ids, batch.vocab_size), axis=1)
    padding = max(width - kept_ids.shape[1], 0)
    compact = jnp.pad(kept_ids[:, :width], ((0, 0), (0, padding)), constant_values=batch.vocab_size)
    packed = bits.pack_ids(kept_ids, batch.vocab_size) if needs_bits(batch, width) else None
    support = Support(compact, counts, packed, batch.vocab_size)
    return Sample(token_ids, logprob, support, counts > 0)


def _draw_from_rows(edited: Float[Array, "B V"], batch: SamplingBatch, steps: Int[Array, " B"], width: int) -> Sample:
    edited = filters.drawable(edited)
    z = filters.temper(edited, edited.max(axis=1), batch.temperature)
    is_kept = bisection.keep(edited, z, batch.min_p, batch.top_k, batch.top_p)
    all_ids = jnp.broadcast_to(jnp.arange(batch.vocab_size, dtype=jnp.int32)[None, :], z.shape)
    token_ids, logprob = _winner(z, is_kept, all_ids, batch, steps)
    words = bits.pack_words(is_kept)
    compact, counts = bits.select_ids(words, width, fill=batch.vocab_size)
    packed = bits.words_to_bytes(words, batch.vocab_size) if needs_bits(batch, width) else None
    return Sample(token_ids, logprob, Support(compact, counts, packed, batch.vocab_size), counts > 0)


def _redraw_rows(
    drawn: Sample,
    is_flagged: Bool[Array, " B"],
    edited: Float[Array, "B V"],
    batch: SamplingBatch,
    steps: Int[Array, " B"],
    width: int,
) -> Sample:
    """`drawn` with the flagged rows drawn again from their whole rows, one at a time."""
    (flagged,) = jnp.nonzero(is_flagged, size=is_flagged.shape[0], fill_value=0)

    def redraw(i: Array, drawn: Sample) -> Sample:
        row = flagged[i].astype(jnp.int32)
        row_edited, row_batch, row_steps = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1, axis=0), (edited, batch, steps)
        )
        return jax.tree.map(
            lambda all_rows, new: jax.lax.dynamic_update_slice_in_dim(all_rows, new, row, axis=0),
            drawn,
            _draw_from_rows(row_edited, row_batch, row_steps, width),
        )

    # The condition keeps XLA from computing the only row of a batch of one ahead of a loop that may not run.
    return jax.lax.cond(
        is_flagged.any(),
        lambda: jax.lax.fori_loop(0, is_flagged.sum(dtype=jnp.int32), redraw, drawn),
        lambda: drawn,
    )


def _winner(
    z: Float[Array, "B C"],
    is_kept: Bool[Array, "B C"],
    token_ids: Int[Array, "B C"],
    batch: SamplingBatch,
    steps: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The id of the largest z + noise among the kept columns, and its log-probability over them."""
    noise = draw.gumbel(batch.seeds, steps, token_ids)
    noise = jnp.where((batch.temperature > 0)[:, None], noise, 0.0)
    score = jnp.where(is_kept, z + noise, -jnp.inf)
    # Equal scores go to the lower id, so the winner does not depend on the order of the columns.
    is_best = is_kept & (score == score.max(axis=1, keepdims=True))
    winner = jnp.where(is_best, token_ids, batch.vocab_size).min(axis=1)
    log_mass = jnp.log(jnp.where(is_kept, jnp.exp(z), 0.0).sum(axis=1))
    winner_z = jnp.where(token_ids == winner[:, None], z, -jnp.inf).max(axis=1)
    return jnp.where(winner < batch.vocab_size, winner, 0), winner_z - log_mass


def _without_opted_out(support: Support, batch: SamplingBatch) -> Support:
    if batch.returns_support is None:
        return support
    returned = batch.returns_support
    return Support(
        jnp.where(returned[:, None], support.token_ids, batch.vocab_size),
        jnp.where(returned, support.counts, 0),
        None if support.packed is None else jnp.where(returned[:, None], support.packed, jnp.uint8(0)),
        batch.vocab_size,
    )


def _check_shapes(logits: Float[Array, "B V"], batch: SamplingBatch, width: int) -> None:
    if logits.ndim != 2 or logits.shape[0] != batch.num_rows or logits.shape[1] < batch.vocab_size:
        raise ValueError(
            f"logits must be [{batch.num_rows}, at least {batch.vocab_size}] to fit the batch, got {logits.shape}."
        )
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}.")
