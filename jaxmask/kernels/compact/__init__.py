"""Compaction: logits or a kept set over the vocabulary to ascending ids, counts and packed bits."""

from jaxmask.kernels.compact.api import compact_support

__all__ = ["compact_support"]
