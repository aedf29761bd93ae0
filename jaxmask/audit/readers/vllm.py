"""Answers of vLLM's `/inference/v1/generate`, and of our own server's endpoints that return supports.

A choice holds `token_ids`; `sampling_mask`, one list of ids for each token (of our server also `{"token_ids",
"offsets"}`, base64 of little-endian int32); `logprobs`, `{"content": [{"logprob", ...}]}` or `{"token_logprobs"}`.
Log-probabilities of all ids of the supports are `sampling_mask_logprobs` (prime-rl's build), or `logprobs` inside of a
`sampling_mask` object (vLLM after 0.33). A choice may hold `full_logprobs` besides, the tokens' log-probabilities over
the vocabulary, which vLLM does not send. `top_logprobs` are not read.

Source: vLLM 0.33, entrypoints/scale_out/token_in_token_out/protocol.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from jaxmask.audit import values
from jaxmask.audit.completion import NOT_SAID, Completion, Cut
from jaxmask.audit.events import joined
from jaxmask.audit.exchange import Exchange
from jaxmask.audit.prompt import prompt_key
from jaxmask.audit.requests import SILENT, raised, setting_of
from jaxmask.audit.values import WHOLE_ROW, Problem, shown


def knows(answer: Any) -> bool:
    """Whether a value looks like an answer, or like the events of one."""
    if isinstance(answer, list):
        return any(knows(event) for event in answer[:8])
    return isinstance(answer, dict) and isinstance(answer.get("choices"), list)


def completions(exchange: Exchange) -> Iterator[Completion]:
    """One row for each choice of an answer."""
    is_streamed = isinstance(exchange.answer, list)
    answer, known = joined(exchange.answer) if is_streamed else (exchange.answer, [])
    if not knows(answer):
        problem = Problem(WHOLE_ROW, "choices", f"{shown(answer)} is no answer with choices")
        yield Completion(exchange.where.name(), [], problems=(*known, problem))
        return
    request = exchange.request or {}
    problems = [*known]
    has_request = "sampling_params" in request
    # The token endpoint's silence is known; that of the others is the model's own recommendation.
    params = request["sampling_params"] if has_request else request
    setting = raised(setting_of(params, problems, silent=SILENT if has_request else NOT_SAID))
    if has_request and isinstance(params, Mapping):
        # vLLM sends none unless a number of them is asked for.
        setting = dataclasses.replace(setting, asks_for_logprobs=params.get("logprobs") is not None)
    # Other endpoints take the prompt as text.
    prompt = answer.get("prompt_token_ids") if request.get("token_ids") is None else request["token_ids"]
    group = prompt_key(prompt)
    if group is None and len(answer["choices"]) > 1:
        group = (exchange.where.line, exchange.where.item)
    if not answer["choices"]:
        problem = Problem(WHOLE_ROW, "choices", "the answer has none")
        yield Completion(exchange.where.name(), [], [], [], setting=setting, problems=(*problems, problem))
    if not is_streamed:
        _check_usage(answer, problems)
    for number, choice in enumerate(answer["choices"]):
        index = choice.get("index") if isinstance(choice, dict) else None
        shown_index = index if type(index) is int else number
        name = exchange.where.name(shown_index if len(answer["choices"]) > 1 else None)
        row = completion(name, choice, problems, setting=setting, group=group)
        yield dataclasses.replace(row, prompt_ids=prompt)
        problems = []


def completion(name: str, choice: Any, known: list[Problem], *, setting: Any, group: Hashable) -> Completion:
    """The row of one choice.

    Args:
      name: of the row.
      choice: an object, or anything.
      known: problems so far.
      setting: what it was sampled with.
      group: of the row.
    """
    if not isinstance(choice, dict):
        problem = Problem(WHOLE_ROW, "choices", f"{shown(choice)} stands where a choice should")
        return Completion(name, [], setting=setting, group=group, problems=(*known, problem))
    problems = [*known]
    if "error" in choice:
        problems.append(Problem(WHOLE_ROW, "error", f"the answer ended with an error: {shown(choice['error'])}"))
    supports, kept = masks(choice.get("sampling_mask"), problems)
    return Completion(
        name,
        choice.get("token_ids"),
        supports=supports,
        logprobs=_logprobs(choice.get("logprobs"), choice.get("token_ids"), problems),
        full_logprobs=choice.get("full_logprobs"),
        kept_logprobs=choice.get("sampling_mask_logprobs") if kept is None else kept,
        setting=setting,
        group=group,
        problems=tuple(problems),
    )


def masks(mask: Any, problems: list[Problem]) -> tuple[Any, Any]:
    """The supports of a choice, and what stands beside their ids; None for what is not there."""
    if not isinstance(mask, dict):
        return mask, None
    if "offsets" not in mask:
        return mask.get("token_ids"), mask.get("logprobs")
    ids = values.packed(mask.get("token_ids"), "<i4", "sampling_mask.token_ids", problems)
    offsets = values.packed(mask["offsets"], "<i4", "sampling_mask.offsets", problems)
    return None if ids is None or offsets is None else Cut(ids, offsets), None


def _check_usage(answer: Mapping[str, Any], problems: list[Problem]) -> None:
    usage = answer.get("usage")
    stated = usage.get("completion_tokens") if isinstance(usage, dict) else None
    given = [choice.get("token_ids") for choice in answer["choices"] if isinstance(choice, dict)]
    number = sum(len(token_ids) for token_ids in given if isinstance(token_ids, list))
    if type(stated) is int and all(map(_is_list, given)) and number != stated:
        text = f"completion_tokens are {stated}, and the choices hold {number}"
        problems.append(Problem(WHOLE_ROW, "usage", text))


def _logprobs(given: Any, token_ids: Any, problems: list[Problem]) -> Any:
    if not isinstance(given, dict):
        return given
    if "content" not in given:
        return given.get("token_logprobs")
    content = given["content"]
    try:
        found = [entry["logprob"] for entry in content]
        if content and "token_id" in content[0]:
            check_same([entry["token_id"] for entry in content], token_ids, problems)
        return found
    # Anything may stand there; then one by one.
    except (KeyError, TypeError, IndexError):
        return None if content is None else [_logprob(entry) for entry in content] if _is_list(content) else content


def check_same(named: list[Any], token_ids: Any, problems: list[Problem]) -> None:
    """Adds a problem for each log-probability that is named as that of another token."""
    if named == token_ids or not _is_list(token_ids):
        return
    for position, (one, other) in enumerate(zip(named, token_ids, strict=False)):
        # A token that is none is named elsewhere.
        if one != other and values.is_integer(other):
            text = f"the log-probability is that of token {shown(one)}, and the token is {shown(other)}"
            problems.append(Problem(position, "logprobs", text))


def _logprob(entry: Any) -> Any:
    return entry.get("logprob") if isinstance(entry, dict) else entry


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
