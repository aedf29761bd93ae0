"""Support-exact sampling and learning for LLM reinforcement learning in JAX.

`sample` and `generate` return, with every token, the ids it was drawn from (its support); `support_log_probs` scores a
policy on exactly these ids.
"""

from jaxmask.batch import SamplingBatch
from jaxmask.checks import check_engine, check_sampling_mask
from jaxmask.draft_model import DraftModel
from jaxmask.drawn import Sample, TopLogprobs
from jaxmask.engines import (
    rollout_from_miles,
    rollout_from_prime_rl,
    rollout_from_sglang,
    rollout_from_vllm,
)
from jaxmask.generate import generate
from jaxmask.history import History
from jaxmask.params import SamplingParams
from jaxmask.policy import Reference, Scores, full_scores, masked_log_probs, support_log_probs, support_scores
from jaxmask.prompt import PromptLogprobs, prompt_logprobs
from jaxmask.prompt_lookup import PromptLookup
from jaxmask.ragged_support import RaggedSupport
from jaxmask.received import rollout_from_csr, rollout_from_lists
from jaxmask.recording import NewTokens
from jaxmask.replay import Replay
from jaxmask.rollout import Finish, Rollout
from jaxmask.rollout_file import load_rollout, save_rollout
from jaxmask.sampling import sample
from jaxmask.streaming import stream
from jaxmask.support import Support

__version__ = "0.1.0"

__all__ = [
    "DraftModel",
    "Finish",
    "History",
    "NewTokens",
    "PromptLogprobs",
    "PromptLookup",
    "RaggedSupport",
    "Reference",
    "Replay",
    "Rollout",
    "Sample",
    "SamplingBatch",
    "SamplingParams",
    "Scores",
    "Support",
    "TopLogprobs",
    "check_engine",
    "check_sampling_mask",
    "full_scores",
    "generate",
    "load_rollout",
    "masked_log_probs",
    "prompt_logprobs",
    "rollout_from_csr",
    "rollout_from_lists",
    "rollout_from_miles",
    "rollout_from_prime_rl",
    "rollout_from_sglang",
    "rollout_from_vllm",
    "sample",
    "save_rollout",
    "stream",
    "support_log_probs",
    "support_scores",
]
