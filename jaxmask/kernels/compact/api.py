"""Compaction: processed logits over the vocabulary to ascending ids, counts and packed bits."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmask.kernels import dispatch
from jaxmask.kernels.compact import reference
from jaxmask.params import check_count
from jaxmask.support import Support


def compact_support(
    processed_logits: Float[Array, "R V"],
    width: int,
    *,
    support_bound: int | None = None,
    implementation: str = "auto",
) -> Support:
    """The support of each row: its finite entries (NaN, +inf and -inf are out).

    Args:
      processed_logits: logits after every edit and filter, any float dtype.
      width: compact cells per row, W.
      support_bound: the caller's promise that no row keeps more ids; V by default. Packed bits are kept beside the
        cells where W is less than that, so that no support is lost.
      implementation: one of `dispatch.IMPLEMENTATIONS`; "auto" is the kernel on NVIDIA GPUs and plain XLA elsewhere.

    Raises:
      ValueError: unknown implementation, width or support_bound below 1, or logits that are no matrix of floats.
      NotImplementedError: the kernel was asked for, and the logits are float64 or lie off the GPUs.

    Source: vLLM, `_compact_sampling_mask_kernel` (the meaning of ids, counts and bits).
    """
    width = check_count("width", width)
    if processed_logits.ndim != 2 or not jnp.issubdtype(processed_logits.dtype, jnp.floating):
        found = f"{processed_logits.dtype}{list(processed_logits.shape)}"
        raise ValueError(f"processed_logits must be floating-point numbers [R, V], got {found}.")
    vocab_size = processed_logits.shape[1]
    bound = vocab_size if support_bound is None else min(check_count("support_bound", support_bound), vocab_size)
    has_bits = width < bound
    refusal = dispatch.cannot_read(processed_logits)
    chosen = dispatch.choose("compact_support", implementation, processed_logits, refusal)
    # A grid without programs is no grid.
    if chosen == "xla" or processed_logits.shape[0] == 0:
        return reference.compact_support(processed_logits, width, has_bits)
    from jaxmask.kernels.compact import pallas_gpu

    return pallas_gpu.compact_support(processed_logits, width, has_bits, is_interpreted=chosen == "interpret")
