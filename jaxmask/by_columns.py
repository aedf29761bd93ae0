"""The draw of rows whose leading tokens decide everything: a few columns in canonical order, and no more.

These are rows whose top-k fits the columns, whose min-p ends within them, or whose top-p is reached within them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask import bits, candidates, drawn, filters, mass, shards
from jaxmask.batch import SamplingBatch
from jaxmask.drawn import Plan, Sample
from jaxmask.mass import Mass
from jaxmask.support import Support


def draw(
    edited: Float[Array, "B C"], batch: SamplingBatch, steps: Int[Array, " B"], plan: Plan
) -> tuple[Sample, Bool[Array, " B"]]:
    """A sample with `processed_logprobs`, and which of its rows the columns could decide; the others mean nothing.

    Args:
      edited: the columns of the rows that this device holds, any float dtype.
      batch: the rows' settings.
      steps: number of tokens each row has generated.
      plan: what is asked for.
    """
    num = candidates.num_columns(plan.width, batch.vocab_size, plan.num_logprobs or 0)
    columns = candidates.leading_columns(edited, batch.top_k, num, plan.part)
    z = filters.temper(columns.logits, columns.logits[:, 0], batch.temperature)
    survivors = filters.min_p_length(z, batch.min_p)
    length = filters.top_k_length(survivors, batch.top_k)
    is_decided = columns.is_whole | (batch.top_k <= columns.length) | (survivors < columns.length)
    running = mass.running(filters.prefix(z, length))

    # Without a top-k, the mass that top-p is a share of lies in the whole row. A greedy row whose support nobody asks
    # for needs no more than that either.
    is_greedy = batch.is_greedy_without_support() & ((columns.length >= (plan.num_logprobs or 0)) | columns.is_whole)
    is_cut = batch.top_p < 1
    needs_total = ~is_decided & (columns.length > 0) & (batch.top_k >= batch.vocab_size) & (is_cut | is_greedy)
    total = jax.lax.cond(
        needs_total.any(),
        lambda: mass.select(needs_total, _total(edited, columns.logits[:, 0], batch, plan.part), running[:, -1]),
        lambda: running[:, -1],
    )
    nucleus, is_reached = filters.top_p_length(running, total, batch.top_p)
    counts = jnp.where(is_cut, jnp.minimum(nucleus, length), length)
    is_decided |= needs_total & (is_greedy | is_reached)
    last = jnp.maximum(counts - 1, 0)[:, None]
    kept = jax.tree.map(lambda word: jnp.take_along_axis(word, last, axis=1)[:, 0], running)
    kept = mass.select(needs_total & is_greedy, total, kept)
    return _sample(columns, z, counts, kept, batch, steps, plan), is_decided


def _sample(
    columns: candidates.Columns,
    z: Float[Array, "B N"],
    counts: Int[Array, " B"],
    kept: Mass,
    batch: SamplingBatch,
    steps: Int[Array, " B"],
    plan: Plan,
) -> Sample:
    V = batch.vocab_size
    whole = shards.Slice(z.shape[1])
    is_kept = filters.is_prefix(z, counts)
    winner_id, winner_z = drawn.winner(columns.logits, z, is_kept, columns.token_ids, batch, steps, whole)
    log_mass = drawn.log_of(kept)
    logprobs = jnp.where(is_kept, z - log_mass[:, None], -jnp.inf)
    support, support_logprobs = _compact(jnp.where(is_kept, columns.token_ids, V), logprobs, counts, V, plan)
    ranks = top = None
    if plan.num_logprobs is not None:
        ranks = drawn.rank(columns.logits, is_kept, columns.token_ids, winner_id, whole)
        top = drawn.top_logprobs(columns.token_ids, logprobs, counts, plan.num_logprobs, V)
    is_valid = counts > 0
    token_ids = jnp.where(is_valid, winner_id, 0)
    return Sample(token_ids, winner_z - log_mass, support, is_valid, ranks, top, support_logprobs)


def _compact(
    kept_ids: Int[Array, "B N"], logprobs: Float[Array, "B N"], counts: Int[Array, " B"], vocab_size: int, plan: Plan
) -> tuple[Support, Float[Array, "B W"] | None]:
    """Kept ids, in any order among cells that hold V, as a support; and their log-probabilities in its order."""
    packed = bits.pack_ids(kept_ids, vocab_size) if plan.has_bits else None
    padding = ((0, 0), (0, max(plan.width - kept_ids.shape[1], 0)))
    columns = (kept_ids, logprobs) if plan.with_support_logprobs else (kept_ids,)
    cells, *values = (column[:, : plan.width] for column in jax.lax.sort(columns, dimension=1, num_keys=1))
    support = Support(jnp.pad(cells, padding, constant_values=vocab_size), counts, packed, vocab_size)
    return support, jnp.pad(values[0], padding, constant_values=-jnp.inf) if values else None


def _total(edited: Float[Array, "B C"], row_max: Float[Array, " B"], batch: SamplingBatch, part: shards.Slice) -> Mass:
    """The mass of all that survives min-p in each row."""
    z = filters.temper(filters.drawable(edited), row_max, batch.temperature)
    return mass.total(jnp.where(filters.survives_min_p(z, batch.min_p), z, -jnp.inf), part.total)
