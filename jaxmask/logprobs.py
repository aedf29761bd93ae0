"""What reported log-probabilities, ranks and top tokens mean: vLLM's four modes.

    raw_logits            x_a
    raw_logprobs          x_a - log sum_v exp(x_v), before any edit
    processed_logits      edited_a / T, for tokens of the support
    processed_logprobs    log-probability over the support

Source: vLLM, `logprobs_mode`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmask import bisection, candidates, drawn, filters, mass, shards
from jaxmask.batch import SamplingBatch
from jaxmask.drawn import Plan, Sample, TopLogprobs


def reported(
    sample: Sample, raw: Float[Array, "B U"], edited: Float[Array, "B C"], batch: SamplingBatch, plan: Plan
) -> Sample:
    """The sample with values of the plan's mode in place of `processed_logprobs`; supports keep theirs.

    Args:
      sample: with `processed_logprobs`.
      raw: logits before any edit, the columns that this device holds.
      edited: after the edits, before the temperature.
      batch: the rows' settings.
      plan: what is asked for.
    """
    mode, part = plan.logprobs_mode, plan.part
    if mode == "processed_logprobs":
        return sample
    raw, edited = raw[:, : part.size], edited[:, : part.size]
    if mode == "processed_logits":
        factor = filters.inverse_temperature(batch.temperature)[:, None]
        values = _tempered(part.picked(edited, sample.token_ids[:, None]), factor)
        return dataclasses.replace(sample, logprobs=values[:, 0], top=_as_logits(sample.top, edited, factor, part))
    values, ranks, top = raw_values(raw, sample.token_ids, mode, plan.num_logprobs, batch.vocab_size, part)
    return dataclasses.replace(sample, logprobs=values, ranks=ranks, top=top)


def _as_logits(
    top: TopLogprobs | None, edited: Float[Array, "B C"], factor: Float[Array, "B 1"], part: shards.Slice
) -> TopLogprobs | None:
    if top is None:
        return None
    values = _tempered(part.picked(edited, top.token_ids), factor)
    return dataclasses.replace(top, logprobs=jnp.where(jnp.isneginf(top.logprobs), -jnp.inf, values))


def _tempered(logits: Float[Array, "B N"], factor: Float[Array, "B 1"]) -> Float[Array, "B N"]:
    """x / T, finite as x is."""
    most = jnp.finfo(jnp.float32).max
    return jnp.clip(logits * factor, -most, most)


def raw_values(
    raw: Float[Array, "B C"],
    token_ids: Int[Array, " B"],
    mode: str,
    num: int | None,
    vocab_size: int,
    part: shards.Slice,
) -> tuple[Float[Array, " B"], Int[Array, " B"] | None, TopLogprobs | None]:
    """Value and rank of each token, and the top `num`, in a raw mode; without `num` the value alone."""
    row_max, log_mass = _normaliser(raw, mode, part)

    def value(logits: Float[Array, "B N"]) -> Float[Array, "B N"]:
        # The maximum leaves first: added to the logarithm it would take its last digits.
        return (logits - row_max[:, None]) - log_mass[:, None]

    values = value(part.picked(raw, token_ids[:, None]))[:, 0]
    if num is None:
        return values, None, None
    ranks = drawn.rank(raw, jnp.isfinite(raw), part.token_ids(), token_ids, part)
    columns = _leading(raw, num, vocab_size, part)
    top = drawn.top_logprobs(columns.token_ids, value(columns.logits), columns.length, num, vocab_size)
    return values, ranks, top


def _normaliser(
    raw: Float[Array, "B C"], mode: str, part: shards.Slice
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """The largest logit of each row, and the logarithm of the mass relative to it; zeros where logits are reported."""
    if mode == "raw_logits":
        zeros = jnp.zeros(raw.shape[0], jnp.float32)
        return zeros, zeros
    raw = filters.drawable(raw)
    row_max = part.largest(raw.max(axis=1))
    row_max = jnp.where(jnp.isfinite(row_max), row_max, 0.0)
    z = filters.temper(raw, row_max, jnp.ones(raw.shape[0], jnp.float32))
    return row_max, drawn.log_of(mass.total(z, part.total))


def _leading(raw: Float[Array, "B C"], num: int, vocab_size: int, part: shards.Slice) -> candidates.Columns:
    """At least the first `num` tokens of each row in canonical order, where it has as many."""
    num_columns = candidates.num_columns(num, vocab_size)
    needed = jnp.full(raw.shape[0], max(num, 1), jnp.int32)
    columns = candidates.leading_columns(raw, needed, num_columns, part)
    is_short = ~columns.is_whole & (columns.length < needed)

    def searched() -> candidates.Columns:
        # Ties overflow the candidates of some row: exact, and rare enough not to go row by row.
        x = filters.drawable(raw)
        is_token = jnp.isfinite(x)
        count = part.total(is_token.sum(axis=1, dtype=jnp.int32))
        is_first = bisection.first(x, is_token, jnp.minimum(count, needed), part)
        found = candidates.between_columns(x, is_first, num_columns, part)
        return jax.tree.map(
            lambda new, old: jnp.where(is_short.reshape(-1, *(1,) * (old.ndim - 1)), new, old), found, columns
        )

    return jax.lax.cond(is_short.any(), searched, lambda: columns)
