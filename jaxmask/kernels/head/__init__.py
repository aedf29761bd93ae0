"""The gathered LM head: logits, log-probability and entropy over the ids of each row's support."""

from jaxmask.kernels.head.api import HeadScores, gathered_head

__all__ = ["HeadScores", "gathered_head"]
