"""Support-exact sampling and learning for LLM reinforcement learning in JAX.

`sample` and `generate` return, with every token, the ids it was drawn from (its support); `support_log_probs` scores a
policy on exactly these ids.
"""

from jaxmask.batch import SamplingBatch
from jaxmask.edits import History
from jaxmask.generate import generate
from jaxmask.params import SamplingParams, check_sampling_mask
from jaxmask.policy import Scores, full_scores, masked_log_probs, support_log_probs, support_scores
from jaxmask.rollout import Finish, Rollout
from jaxmask.sampling import Sample, sample
from jaxmask.support import Support

__version__ = "0.1.0"

__all__ = [
    "Finish",
    "History",
    "Rollout",
    "Sample",
    "SamplingBatch",
    "SamplingParams",
    "Scores",
    "Support",
    "check_sampling_mask",
    "full_scores",
    "generate",
    "masked_log_probs",
    "sample",
    "support_log_probs",
    "support_scores",
]
