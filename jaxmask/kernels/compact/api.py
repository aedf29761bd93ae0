"""Which implementation of compaction runs."""

from jaxtyping import Array, Float

from jaxmask.kernels.compact import reference
from jaxmask.support import Support

IMPLEMENTATIONS = ("auto", "xla")


def compact_support(processed_logits: Float[Array, "R V"], width: int, *, implementation: str = "auto") -> Support:
    """The support of each row: its finite entries (NaN, +inf and -inf are out).

    Args:
      processed_logits: logits after every edit and filter.
      width: compact cells per row, W; packed bits are kept beside them where W < V.
      implementation: "auto" or "xla" (plain JAX, on every platform).

    Raises:
      ValueError: unknown implementation, or width below 1.

    Source: vLLM, `_compact_sampling_mask_kernel` (the meaning of ids, counts and bits).
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}.")
    return reference.compact_support(processed_logits, width)
