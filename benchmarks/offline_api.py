"""A `Rival` by vLLM's offline API, which `serve.LLM` has too."""

from collections.abc import Callable
from typing import Any

from generate_case import Case


class OfflineRival:
    """Runs an engine with `generate(prompts, sampling_params)` and reads what it returns.

    Attributes:
      engine: vLLM's or ours.
      make_params: its `SamplingParams`, with what is the same for every request filled in.
    """

    def __init__(self, engine: Any, make_params: Callable[..., Any]):
        self.engine = engine
        self.make_params = make_params

    def run(self, case: Case) -> dict[str, list]:
        params = self.make_params(
            temperature=case.temperature,
            top_k=case.top_k,
            top_p=case.top_p,
            max_tokens=case.max_new_tokens,
            ignore_eos=True,
            logprobs=0,
        )
        rows = [found.outputs[0] for found in self.engine.generate(_as_ids(case.prompts), params, use_tqdm=False)]
        return {
            "token_ids": [list(row.token_ids) for row in rows],
            "logprobs": [_values(row.logprobs, row.token_ids) for row in rows],
        }

    def token_logprobs(self, token_ids: list[int]) -> list[float]:
        # Those of prompts are over the whole vocabulary, whatever the mode.
        params = self.make_params(temperature=1.0, top_k=1, max_tokens=1, prompt_logprobs=0)
        [found] = self.engine.generate(_as_ids([token_ids]), params, use_tqdm=False)
        return _values(found.prompt_logprobs[1:], token_ids[1:])


def _as_ids(prompts) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(ids)} for ids in prompts]


def _values(entries, token_ids) -> list[float]:
    return [entry[token_id].logprob for entry, token_id in zip(entries, token_ids, strict=True)]
