"""The draw of rows that a few leading tokens decide: min-p, top-k, top-p, noise, in plain JAX or in kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmask import bits, candidates, drawn, mass
from jaxmask.batch import SamplingBatch
from jaxmask.drawn import Plan, Sample, TopLogprobs
from jaxmask.kernels import dispatch
from jaxmask.kernels.filter import reference
from jaxmask.kernels.filter.records import Decided, settings_of
from jaxmask.support import Support

# Twice as many candidates, and no more, are summed up exactly.
_MAX_WIDTH = mass.MAX_COLUMNS // 2
_LEAST_UNBOUNDED = 1024


def draw(
    edited: Float[Array, "B C"], batch: SamplingBatch, steps: Int[Array, " B"], plan: Plan
) -> tuple[Sample, Bool[Array, " B"]]:
    """A sample with `processed_logprobs`, and which of its rows the leading tokens decide; the others mean nothing.

    Which rows these are differs between implementations; what a decided row holds does not, but for rounding.

    Args:
      edited: edited logits, any float dtype; columns past the slice of the plan (a padded head) are not looked at.
      batch: the rows' settings.
      steps: number of tokens each row has generated.
      plan: what is asked for; `plan.implementation` is resolved, one of pallas_gpu, interpret and xla.
    """
    if plan.implementation == "xla":
        return reference.draw(edited, batch, steps, plan)
    from jaxmask.kernels.filter import pallas_gpu

    num_top = plan.num_logprobs or 0
    num_candidates = _num_candidates(plan.width, num_top, plan.has_bits)
    keeps_all = plan.has_bits or num_top > 0
    decided = pallas_gpu.filter_and_draw(
        edited,
        settings_of(batch, steps),
        vocab_size=batch.vocab_size,
        num_candidates=num_candidates,
        num_cells=max(plan.width, num_candidates) if keeps_all else plan.width,
        num_top=num_top,
        is_interpreted=plan.implementation == "interpret",
    )
    return _sample(decided, edited, batch, plan), decided.is_decided > 0


def refusal(logits: Float[Array, "B C"], plan: Plan, is_cut: bool) -> str | None:
    """Why the kernels cannot draw from these logits; None where they can.

    Args:
      logits: as they came, edited or not.
      plan: what is asked for.
      is_cut: whether the vocabulary is cut over devices.
    """
    if is_cut:
        return "the vocabulary is cut over devices, and the kernels look at whole rows"
    num = max(plan.width, plan.num_logprobs or 0)
    if num > _MAX_WIDTH:
        return f"width or num_logprobs is {num}, and the kernels hold {_MAX_WIDTH} cells at most"
    return dispatch.cannot_read(logits)


def _num_candidates(width: int, num_top: int, has_bits: bool) -> int:
    """A power of two, as kernels need it, and some more than `candidates.num_columns`."""
    least = 2 * max(width, num_top) + 32
    # Supports of any size may come: what decides more of these rows here costs less than a second look at them.
    least = max(least, _LEAST_UNBOUNDED) if has_bits else least
    return min(1 << (least - 1).bit_length(), mass.MAX_COLUMNS)


def _sample(decided: Decided, edited: Float[Array, "B C"], batch: SamplingBatch, plan: Plan) -> Sample:
    V = batch.vocab_size
    packed = bits.pack_ids(decided.cells, V) if plan.has_bits else None
    support = Support(decided.cells[:, : plan.width], decided.counts, packed, V)
    ranks = top = None
    if plan.num_logprobs is not None:
        ranks, top = decided.ranks, _top(decided, edited, plan.num_logprobs, V)
    return Sample(
        decided.token_ids,
        decided.logprobs,
        support,
        decided.counts > 0,
        ranks,
        top,
        decided.values[:, : plan.width] if plan.with_support_logprobs else None,
    )


def _top(decided: Decided, edited: Float[Array, "B C"], num: int, vocab_size: int) -> TopLogprobs:
    """The likeliest kept tokens in canonical order."""
    logits = jnp.take_along_axis(edited, jnp.minimum(decided.cells, vocab_size - 1), axis=1).astype(jnp.float32)
    keys = jnp.where(decided.cells < vocab_size, candidates.order_keys(logits), jnp.uint32(0))
    _, ids, values = jax.lax.sort((~keys, decided.cells, decided.values), dimension=1, num_keys=2)
    return drawn.top_logprobs(ids, values, decided.counts, num, vocab_size)
