"""The gathered head: hidden states and ragged ids to logits, log-probabilities and entropy on each row's ids."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmask import filters
from jaxmask.gathered import Cells
from jaxmask.kernels import dispatch
from jaxmask.kernels.head import reference
from jaxmask.kernels.head.reference import HeadScores

__all__ = ["HeadScores", "gathered_head", "kept_logits", "refusal"]

_READABLE = ("float32", "bfloat16")


def gathered_head(
    hidden: Float[Array, "N D"],
    head: Float[Array, "U D"],
    token_ids: Int[Array, " M"],
    starts: Int[Array, " N"],
    counts: Int[Array, " N"],
    drawn_ids: Int[Array, " N"],
    temperature: Float[Array, " N"],
    *,
    implementation: str = "auto",
) -> HeadScores:
    """Logits, log-probability and entropy of each row over its own ids; never builds [N, U].

    log p(a) = x_a / T - log sum_j exp(x_j / T),  H = -sum_j p_j log p_j,  x_j = hidden[n] . head[id_j]

    Row n owns the cells starts[n] : starts[n] + counts[n] of `token_ids`. Offsets of a CSR form are such starts, and so
    are the multiples of W for supports of W cells. Cells nobody owns and hidden states of rows without ids may hold
    anything, NaN included: they change nothing, bit for bit, and get no gradient.

    Differentiable in `hidden` and `head`, the kernel once and in reverse, with sums in float32 and gradients in their
    dtypes, the same bits on every run of the kernel. The gradient is exactly 0 in rows of `head` whose id no row holds.
    A log-probability of -inf gives no gradient.

    Args:
      hidden: final hidden states; the kernel reads float32 and bfloat16.
      head: rows of the LM head.
      token_ids: the ids of all rows, in [0, U) where a row owns the cell; without repeats within a row.
      starts: the first cell of each row, ascending.
      counts: cells of each row, at least 0; rows do not overlap.
      drawn_ids: the id each row is scored for.
      temperature: of each row, at least 0.01, or 0 (greedy): tempers nothing.
      implementation: one of `dispatch.IMPLEMENTATIONS`; "auto" is the kernel on NVIDIA GPUs and plain XLA elsewhere.

    Raises:
      ValueError: unknown implementation, or shapes that do not fit.
      NotImplementedError: the kernel was asked for, and there are 2^31 cells or more, or another dtype.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (the distribution that is scored).
    """
    _check_shapes(hidden, head, token_ids, starts=starts, counts=counts, drawn_ids=drawn_ids, temperature=temperature)
    chosen = dispatch.choose("gathered_head", implementation, hidden, refusal(hidden, head, token_ids))
    factor = jax.lax.stop_gradient(filters.inverse_temperature(temperature.astype(jnp.float32)))
    rows = (
        token_ids.astype(jnp.int32),
        starts.astype(jnp.int32),
        counts.astype(jnp.int32),
        drawn_ids.astype(jnp.int32),
    )
    # Nothing to read: a kernel's grid and its addresses need at least one element.
    if chosen == "xla" or 0 in (hidden.size, head.size, token_ids.size):
        return reference.gathered_head(hidden, head, *rows, factor)
    from jaxmask.kernels.head import pallas_gpu

    return pallas_gpu.gathered_head(hidden, head, *rows, factor, chosen == "interpret")


def kept_logits(
    hidden: Float[Array, "N D"], head: Float[Array, "U D"], cells: Cells, *, implementation: str = "auto"
) -> Float[Array, "N W"]:
    """The logits of `gathered_head` for the cells that are asked for; 0 in the others.

    Args:
      hidden: one state per row.
      head: rows of the LM head.
      cells: ids in [0, U).
      implementation: one of `dispatch.IMPLEMENTATIONS`.
    """
    token_ids, starts, counts = cells
    num_rows, width = token_ids.shape
    starts = starts + jnp.arange(num_rows, dtype=jnp.int32) * width
    # Log-probabilities are left to the caller, who may edit the logits first.
    rows = (counts, jnp.zeros_like(counts), jnp.ones(num_rows, jnp.float32))
    scores = gathered_head(hidden, head, token_ids.reshape(-1), starts, *rows, implementation=implementation)
    return scores.kept_logits.reshape(num_rows, width)


def refusal(hidden: Float[Array, "*B D"], head: Float[Array, "U D"], token_ids: Int[Array, "..."]) -> str | None:
    """Why the kernel cannot read these arrays; None where it can."""
    for name, array in (("hidden", hidden), ("head", head)):
        if array.dtype not in _READABLE:
            return f"{name} is {array.dtype}, and the kernel reads {' and '.join(_READABLE)}"
    return dispatch.too_many_cells(token_ids)


def _check_shapes(hidden: Array, head: Array, token_ids: Array, **per_row: Array) -> None:
    for name, array, axes in (("hidden", hidden, 2), ("head", head, 2), ("token_ids", token_ids, 1)):
        if array.ndim != axes:
            raise ValueError(f"{name} must have {axes} axes, got shape {array.shape}.")
    if head.shape[1] != hidden.shape[1]:
        raise ValueError(f"head must have the {hidden.shape[1]} columns of hidden, got shape {head.shape}.")
    for name, array in per_row.items():
        if array.shape != hidden.shape[:1]:
            raise ValueError(f"{name} must have shape {hidden.shape[:1]}, one per row of hidden, got {array.shape}.")
