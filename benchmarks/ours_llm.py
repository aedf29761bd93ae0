"""Our offline engine, `serve.LLM`, with supports on; what it returns is read as vLLM's is."""

from offline_api import OfflineRival

from jaxmask import SamplingParams
from serve import LLM

MAX_ROWS = 32


class Rival(OfflineRival):
    def __init__(self, folder: str, max_length: int):
        engine = LLM(
            folder,
            return_sampling_mask=True,
            logprobs_mode="processed_logprobs",
            max_model_len=max_length + 1,
            max_num_seqs=MAX_ROWS,
        )
        super().__init__(engine, SamplingParams)
