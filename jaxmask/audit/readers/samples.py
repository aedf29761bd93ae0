"""`samples.jsonl` of our trainer, and anything that is written like it: one completion a line.

An object with `token_ids`, `sampling_mask` (one list of ids for each token) and `logprobs` (of each token over its
support). What stands beside is read too: `prompt_token_ids`, `sampling_params`, `loss_mask`, `full_logprobs` (of each
token over the vocabulary at the temperature), `sampling_mask_logprobs` (one list for each support).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxmask.audit.completion import NOT_SAID, Completion
from jaxmask.audit.exchange import Exchange
from jaxmask.audit.prompt import prompt_key
from jaxmask.audit.readers import vllm
from jaxmask.audit.requests import raised, setting_of
from jaxmask.audit.values import Problem


def knows(answer: Any) -> bool:
    """Whether a value looks like a sample."""
    return isinstance(answer, dict) and "token_ids" in answer and "sampling_mask" in answer


def completions(exchange: Exchange) -> Iterator[Completion]:
    """The row of a sample."""
    sample = exchange.answer
    problems: list[Problem] = []
    setting = raised(setting_of(sample.get("sampling_params"), problems, silent=NOT_SAID))
    prompt = sample.get("prompt_token_ids")
    group = prompt_key(prompt)
    completion = vllm.completion(exchange.where.name(), sample, problems, setting=setting, group=group)
    yield dataclasses.replace(completion, loss_mask=sample.get("loss_mask"), prompt_ids=prompt)
