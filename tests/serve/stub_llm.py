"""An `LLM` that answers every prompt with the same tokens, and keeps what it was asked."""

import dataclasses
from typing import ClassVar

from stub_text import Pieces

from jaxmask.wire import Logprob
from serve.outputs import CompletionOutput, RequestOutput, SamplingMask

PIECES = ("Paris", ", of", " course", ".\n", "\n", "It", " is\x1b[31m", "<|eos|>")
SIZES = (1, 1, 2, 8, 9, 32, 33, 3)
MASK = SamplingMask.from_lists([list(range(size)) for size in SIZES])
TOKENIZER = Pieces(*PIECES)


class StubLLM:
    """Attributes: made, all of them; finish_reason, of the completions to come."""

    made: ClassVar[list["StubLLM"]] = []
    finish_reason = "stop"

    def __init__(self, model, **settings):
        self.model, self.settings, self.asked = model, settings, None
        StubLLM.made.append(self)

    def get_tokenizer(self):
        return TOKENIZER

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        self.asked = (prompts, sampling_params)
        return [self._answer(str(index), prompt, sampling_params) for index, prompt in enumerate(prompts)]

    def chat(self, messages, sampling_params=None, *, use_tqdm=True):
        self.asked = (messages, sampling_params)
        return [self._answer(str(index), None, sampling_params) for index in range(len(messages))]

    def _answer(self, request_id, prompt, params):
        completions = [self._completion(index, params) for index in range(params.n)]
        return RequestOutput(request_id, prompt, [1, 2], None, completions, True)

    def _completion(self, index, params):
        completion = CompletionOutput(
            index,
            "".join(PIECES[:-1]),
            list(range(len(PIECES))),
            finish_reason=self.finish_reason,
            sampling_mask=MASK if self.settings["return_sampling_mask"] else None,
        )
        if params.logprobs is None:
            return completion
        entries = [{token_id: Logprob(-0.5, 1, piece)} for token_id, piece in enumerate(PIECES)]
        entries[0][7] = Logprob(float("-inf"), 2, "x")
        return dataclasses.replace(completion, logprobs=entries, cumulative_logprob=-4.0)
