"""vLLM's offline engine on the CPU, float32, in the very process that asks for it.

Its CPU build returns no sampling masks: they need its newer runner, and that one Triton. Its log-probabilities are
those of the truncated distribution, like ours.
"""

import functools
import os

# Read when vLLM is imported. One process: nothing is sent between two; 2 GiB hold the keys and values of every row.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from offline_api import OfflineRival
from vllm import LLM, SamplingParams

MAX_ROWS = 32


class Rival(OfflineRival):
    def __init__(self, folder: str, max_length: int, enforce_eager: bool = True):
        engine = LLM(
            model=folder,
            dtype="float32",
            skip_tokenizer_init=True,
            # A token more, for the log-probabilities of the longest prompt.
            max_model_len=max_length + 1,
            max_num_seqs=MAX_ROWS,
            # Prompts repeat from run to run here, and nowhere else.
            enable_prefix_caching=False,
            enforce_eager=enforce_eager,
            logprobs_mode="processed_logprobs",
        )
        super().__init__(engine, functools.partial(SamplingParams, detokenize=False))
