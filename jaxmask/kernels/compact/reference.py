"""Compaction in plain JAX: the oracle of the kernels, and the path of every platform without one."""

from jaxtyping import Array, Float

from jaxmask import support
from jaxmask.support import Support


def compact_support(processed_logits: Float[Array, "R V"], width: int, has_bits: bool) -> Support:
    """The finite entries of each row."""
    return support.compact(processed_logits, width, has_bits)
