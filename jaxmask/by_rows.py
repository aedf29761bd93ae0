"""The draw of rows whose kept set may be anything: an exact search over each whole row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmask import bisection, bits, candidates, drawn, filters, mass, shards
from jaxmask.batch import SamplingBatch
from jaxmask.drawn import Plan, Sample, TopLogprobs
from jaxmask.support import Support

_ROWS_AT_ONCE = 16


def draw(edited: Float[Array, "B C"], batch: SamplingBatch, steps: Int[Array, " B"], plan: Plan) -> Sample:
    """A sample with `processed_logprobs`; the arguments are those of `by_columns.draw`, with any columns of padding."""
    part, V = plan.part, batch.vocab_size
    edited = filters.drawable(edited[:, : part.size])
    z = filters.temper(edited, part.largest(edited.max(axis=1)), batch.temperature)
    is_kept = bisection.keep(edited, z, batch.min_p, batch.top_k, batch.top_p, part)
    winner_id, winner_z = drawn.winner(edited, z, is_kept, part.token_ids(), batch, steps, part)
    log_mass = drawn.log_of(mass.total(jnp.where(is_kept, z, -jnp.inf), part.total))
    support = _compact(is_kept, V, plan)
    ranks = top = support_logprobs = None
    if plan.num_logprobs is not None:
        ranks = drawn.rank(edited, is_kept, part.token_ids(), winner_id, part)
        top = _top(edited, z - log_mass[:, None], is_kept, support.counts, V, plan)
    if plan.with_support_logprobs:
        values = part.picked(jnp.where(is_kept, z - log_mass[:, None], 0.0), support.token_ids)
        support_logprobs = jnp.where(support.cells(), values, -jnp.inf)
    is_valid = support.counts > 0
    token_ids = jnp.where(is_valid, winner_id, 0)
    return Sample(token_ids, winner_z - log_mass, support, is_valid, ranks, top, support_logprobs)


def redraw(
    sample: Sample,
    is_flagged: Bool[Array, " B"],
    edited: Float[Array, "B C"],
    batch: SamplingBatch,
    steps: Int[Array, " B"],
    plan: Plan,
) -> Sample:
    """`sample` with the flagged rows drawn again from their whole rows, one or a few at a time."""
    # A CPU gains nothing from rows side by side; a GPU needs them to be busy.
    at_once = 1 if plan.implementation == "xla" else min(_ROWS_AT_ONCE, is_flagged.shape[0])
    num_blocks = -(-is_flagged.shape[0] // at_once)
    (flagged,) = jnp.nonzero(is_flagged, size=num_blocks * at_once, fill_value=is_flagged.shape[0])

    def redraw_some(i: Array, sample: Sample) -> Sample:
        rows = jax.lax.dynamic_slice_in_dim(flagged.astype(jnp.int32), i * at_once, at_once)
        some_edited, some_batch, some_steps = jax.tree.map(lambda leaf: _rows_of(leaf, rows), (edited, batch, steps))
        drawn_again = draw(some_edited, some_batch, some_steps, plan)
        return jax.tree.map(lambda all_rows, new: _with_rows(all_rows, rows, new), sample, drawn_again)

    # The condition keeps XLA from computing the only row of a batch of one ahead of a loop that may not run.
    return jax.lax.cond(
        is_flagged.any(),
        lambda: jax.lax.fori_loop(0, -(-is_flagged.sum(dtype=jnp.int32) // at_once), redraw_some, sample),
        lambda: sample,
    )


def _rows_of(leaf: Array, rows: Int[Array, " N"]) -> Array:
    """Some rows of a batch; those past its end are clipped."""
    if rows.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(leaf, rows[0], 1, axis=0)
    return jnp.take(leaf, rows, axis=0, mode="clip")


def _with_rows(leaf: Array, rows: Int[Array, " N"], new: Array) -> Array:
    """A batch with other values of some rows; what is there for rows past its end is dropped."""
    if rows.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, rows[0], axis=0)
    return leaf.at[rows].set(new, mode="drop")


def _compact(is_kept: Bool[Array, "B C"], vocab_size: int, plan: Plan) -> Support:
    part = plan.part
    words = bits.pack_words(is_kept)
    positions, counts = bits.select_ids(words, plan.width, fill=part.size)
    ids = jnp.where(positions < part.size, part.offset() + positions, vocab_size)
    if not part.is_whole:
        ids = jnp.sort(part.joined(ids), axis=1)[:, : plan.width]
        counts = part.total(counts)
    packed = _packed(is_kept, words, part, vocab_size) if plan.has_bits else None
    return Support(ids, counts, packed, vocab_size)


def _packed(
    is_kept: Bool[Array, "B C"], words: UInt[Array, "B N"], part: shards.Slice, vocab_size: int
) -> UInt[Array, "B P"]:
    """The packed bits of whole rows."""
    if part.size % 8 == 0:
        return part.joined(bits.words_to_bytes(words, part.size))[:, : -(-vocab_size // 8)]
    # Slices that end within a byte: their bits have to be shifted together.
    return bits.words_to_bytes(bits.pack_words(part.joined(is_kept)), vocab_size)


def _top(
    edited: Float[Array, "B C"],
    logprobs: Float[Array, "B C"],
    is_kept: Bool[Array, "B C"],
    counts: Int[Array, " B"],
    vocab_size: int,
    plan: Plan,
) -> TopLogprobs:
    num, part = plan.num_logprobs or 0, plan.part
    if num == 0:
        return TopLogprobs(jnp.zeros((len(counts), 0), jnp.int32), jnp.zeros((len(counts), 0), jnp.float32))
    is_top = bisection.first(edited, is_kept, jnp.minimum(counts, num), part)
    columns = candidates.between_columns(edited, is_top, num, part)
    values = part.picked(jnp.where(is_kept, logprobs, 0.0), columns.token_ids)
    return drawn.top_logprobs(columns.token_ids, values, counts, num, vocab_size)
