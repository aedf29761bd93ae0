"""Filters and draw: logits and settings to a token, its log-probability and its support."""

from jaxmask.kernels.filter.api import draw, refusal

__all__ = ["draw", "refusal"]
