"""Answers of SGLang's `/generate` and `/v1/chat/completions`, asked for with `return_sampling_mask`.

Tokens are `output_ids` (of a chat choice `completion_token_ids`, or the ids of `output_token_logprobs`). In
`meta_info`:

- `output_token_sampling_mask`: one list of ids for each token.
- `output_token_sampling_logprobs`: of each token over its support; or one list for each token, beside its support.
- `output_token_sampling_mask_logprobs`: the lists, where a build sends both.
- `output_token_logprobs`: (log-probability, id, text) of each token over the vocabulary, at the temperature and before
  the filters; of a server started with SGLANG_RETURN_ORIGINAL_LOGPROB before the temperature, which no answer shows.

A request with several prompts, or with n > 1, is answered by a list.

Source: SGLang, pull requests 27408 and 33593, and test/registered/sampling/test_sampling_mask.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from jaxmask.audit.completion import NOT_SAID, Completion, Fields
from jaxmask.audit.exchange import Exchange
from jaxmask.audit.prompt import prompt_key
from jaxmask.audit.readers import vllm
from jaxmask.audit.requests import SILENT, setting_of
from jaxmask.audit.rows import Setting
from jaxmask.audit.values import WHOLE_ROW, Problem, shown

FIELDS = Fields(
    token_ids="output_ids",
    supports="output_token_sampling_mask",
    logprobs="output_token_sampling_logprobs",
    full_logprobs="output_token_logprobs",
    kept_logprobs="output_token_sampling_mask_logprobs",
)
# SGLang, sampling_params.py: below it, a request takes the likeliest token of the logits as they are.
_GREEDY_BELOW = 1e-6


def knows(answer: Any) -> bool:
    """Whether a value looks like an answer, or like a list of some."""
    if isinstance(answer, list):
        return any(isinstance(one, dict) and knows(one) for one in answer[:8])
    if not isinstance(answer, dict):
        return False
    choices = answer.get("choices")
    is_chat = isinstance(choices, list) and any(isinstance(one, dict) and "meta_info" in one for one in choices[:8])
    return is_chat or "meta_info" in answer


def completions(exchange: Exchange) -> Iterator[Completion]:
    """One row for each answer."""
    answer, request = exchange.answer, exchange.request or {}
    answers = answer if isinstance(answer, list) else answer.get("choices", [answer])
    has_several = len(answers) > 1
    for number, one in enumerate(answers):
        name = exchange.where.name(number if has_several else None)
        problems: list[Problem] = []
        setting = _setting(request, number, len(answers), problems)
        prompt = _prompt(request, number, len(answers))
        group = _group(exchange, prompt, number, len(answers))
        yield dataclasses.replace(_completion(name, one, setting, group, problems), prompt_ids=prompt)


def _completion(name: str, answer: Any, setting: Setting, group: Hashable, problems: list[Problem]) -> Completion:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        text = f"{shown(answer)} stands where an answer with meta_info should"
        return Completion(name, [], setting=setting, group=group, problems=(*problems, Problem(WHOLE_ROW, "", text)))
    triples = meta.get("output_token_logprobs")
    token_ids = answer.get("output_ids", answer.get("completion_token_ids"))
    token_ids = _column(triples, 1) if token_ids is None else token_ids
    named = _column(triples, 1)
    if isinstance(named, list):
        vllm.check_same(named, token_ids, problems)
    supports = meta.get("output_token_sampling_mask")
    logprobs, kept = meta.get("output_token_sampling_logprobs"), meta.get("output_token_sampling_mask_logprobs")
    if isinstance(logprobs, list) and any(isinstance(entry, list) for entry in logprobs):
        kept = logprobs if kept is None else kept
        logprobs = _drawn(token_ids, supports, logprobs)
    return Completion(
        name,
        token_ids,
        supports=supports,
        logprobs=logprobs,
        full_logprobs=_column(triples, 0),
        kept_logprobs=kept,
        setting=setting,
        group=group,
        fields=FIELDS,
        problems=tuple(problems),
    )


def _column(triples: Any, index: int) -> Any:
    try:
        return None if triples is None else [triple[index] for triple in triples]
    # Not all of them are triples; then what is none stands for itself, to be named.
    except (TypeError, IndexError, KeyError):
        return triples


def _drawn(token_ids: Any, supports: Any, kept: list[Any]) -> Any:
    """Of each token, its own among the numbers beside its support; None where it is not there."""
    if not isinstance(token_ids, list) or not isinstance(supports, list):
        return None
    return [_own(*parts) for parts in zip(token_ids, supports, kept, strict=False)]


def _own(token_id: Any, support: Any, numbers: Any) -> Any:
    if not isinstance(support, list) or not isinstance(numbers, list) or token_id not in support:
        return None
    place = support.index(token_id)
    return numbers[place] if place < len(numbers) else None


def _setting(request: Mapping[str, Any], number: int, num_answers: int, problems: list[Problem]) -> Setting:
    has_params = "sampling_params" in request
    params = _of_answer(request["sampling_params"] if has_params else request, number, num_answers)
    setting = setting_of(params, problems, silent=SILENT if has_params else NOT_SAID)
    temperature = setting.temperature
    if temperature is not None and 0 <= temperature < _GREEDY_BELOW:
        return dataclasses.replace(setting, temperature=1.0, top_k=1)
    return setting


def _prompt(request: Mapping[str, Any], number: int, num_answers: int) -> Any:
    prompt = request.get("input_ids")
    is_nested = isinstance(prompt, list) and any(isinstance(one, list) for one in prompt[:1])
    return _of_answer(prompt, number, num_answers) if is_nested else prompt


def _group(exchange: Exchange, prompt: Any, number: int, num_answers: int) -> Hashable:
    key = prompt_key(prompt)
    if key is not None or num_answers == 1:
        return key
    texts = None if exchange.request is None else exchange.request.get("text")
    # Text is known to be of one prompt, or to be a list of them.
    which = number * len(texts) // num_answers if isinstance(texts, list) else 0
    return (exchange.where.line, exchange.where.item, which)


def _of_answer(given: Any, number: int, num_answers: int) -> Any:
    """What belongs to an answer in a list with an entry for each prompt: the answers of a prompt lie side by side."""
    if not isinstance(given, list):
        return given
    return given[number * len(given) // num_answers] if given else None
