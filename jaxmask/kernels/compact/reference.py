"""Compaction in plain JAX: the oracle of the kernels, and the path of every platform without one."""

from jaxtyping import Array, Float

from jaxmask.support import Support


def compact_support(processed_logits: Float[Array, "R V"], width: int) -> Support:
    """The finite entries of each row, by words of 32 ids (see `jaxmask.bits`)."""
    return Support.from_logits(processed_logits, width)
