"""Miles' samples, and its batches of them: prompt and response in one sequence of tokens.

A sample holds `tokens`, `response_length`, and for each token of the response `loss_mask`, `rollout_log_probs` and its
support, in `rollout_sampling_mask_ids` (int32) and `rollout_sampling_mask_offsets` (int64), with
`rollout_sampling_mask_log_probs` (float32) beside the ids where score centering asks for them; or the three as `ids`,
`offsets` and `logprobs` of `rollout_sampling_mask`. `sampling_params` may stand beside. Samples with one `group_index`
are of one prompt. A batch holds lists of all that, under `response_lengths`, `loss_masks` and else the same names.

The arrays are lists, or base64 of little-endian bytes. Miles moves them between processes and keeps no file of JSON:
this is its records as JSON lines, or an archive of arrays `tokens_0`, `rollout_sampling_mask_ids_0`, ...

Source: Miles, miles/utils/types.py, Sample, and its data conversion for training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxmask.audit import values
from jaxmask.audit.completion import NOT_SAID, Completion, Cut, Fields
from jaxmask.audit.exchange import Exchange
from jaxmask.audit.prompt import prompt_key
from jaxmask.audit.requests import setting_of
from jaxmask.audit.values import WHOLE_ROW, Problem, shown

_MASK = "rollout_sampling_mask"
FIELDS = Fields(token_ids="tokens", supports=_MASK, logprobs="rollout_log_probs", kept_logprobs=f"{_MASK}_log_probs")
_OF_BATCH = {"response_lengths": "response_length", "loss_masks": "loss_mask", "sample_indices": "index"}
_PER_SAMPLE = ("tokens", FIELDS.logprobs, f"{_MASK}_ids", f"{_MASK}_offsets", FIELDS.kept_logprobs, "group_index")


def knows(answer: Any) -> bool:
    """Whether a value looks like a sample or like a batch."""
    if not isinstance(answer, dict) or "tokens" not in answer:
        return False
    has_length = "response_length" in answer or "response_lengths" in answer
    return has_length or any(isinstance(name, str) and name.startswith(_MASK) for name in answer)


def completions(exchange: Exchange) -> Iterator[Completion]:
    """The row of a sample, or the rows of a batch."""
    answer = exchange.answer
    if "response_lengths" not in answer:
        yield _completion(exchange.where.name(), answer)
        return
    lengths = answer["response_lengths"]
    for number in range(len(lengths) if isinstance(lengths, list) else 0):
        names = {**_OF_BATCH, **dict(zip(_PER_SAMPLE, _PER_SAMPLE, strict=True))}
        one = {own: _entry(answer[name], number) for name, own in names.items() if name in answer}
        yield _completion(exchange.where.name(number), one)


def _completion(name: str, sample: Mapping[str, Any]) -> Completion:
    problems: list[Problem] = []
    begin = _begin(sample, problems)
    tokens = sample["tokens"]
    supports, kept = _supports(sample, problems)
    group = sample.get("group_index")
    return Completion(
        name,
        tokens[begin:] if begin else tokens,
        supports=supports,
        logprobs=values.unpacked(sample.get(FIELDS.logprobs), "<f4", FIELDS.logprobs, problems),
        kept_logprobs=kept,
        loss_mask=sample.get("loss_mask"),
        setting=setting_of(sample.get("sampling_params"), problems, silent=NOT_SAID),
        group=("index", group) if type(group) is int else prompt_key(tokens[:begin]) if begin else None,
        prompt_ids=tokens[:begin] if begin else None,
        fields=FIELDS,
        problems=tuple(problems),
    )


def _begin(sample: Mapping[str, Any], problems: list[Problem]) -> int:
    """Where the response begins; 0 where that is not known."""
    tokens, length = sample.get("tokens"), sample.get("response_length")
    length = length.item() if isinstance(length, np.ndarray) and length.ndim == 0 else length
    if tokens is None or not values.is_row(tokens):
        return 0
    if type(length) is not int or not 0 <= length <= len(tokens):
        text = f"{shown(length)} stands where a number of at most {len(tokens)} tokens should"
        problems.append(Problem(WHOLE_ROW, "response_length", text))
        return 0
    return len(tokens) - length


def _supports(sample: Mapping[str, Any], problems: list[Problem]) -> tuple[Cut | None, Any]:
    whole = sample.get(_MASK)
    if isinstance(whole, dict):
        given = whole.get("ids"), whole.get("offsets"), whole.get("logprobs")
    else:
        given = sample.get(f"{_MASK}_ids"), sample.get(f"{_MASK}_offsets"), sample.get(FIELDS.kept_logprobs)
        if whole is not None:
            problems.append(Problem(WHOLE_ROW, _MASK, f"{shown(whole)} stands where ids and offsets should"))
    if given[0] is None and given[1] is None:
        return None, None
    for part, name in zip(given, ("ids", "offsets"), strict=False):
        if part is None:
            problems.append(Problem(WHOLE_ROW, f"{_MASK}_{name}", "it is missing"))
    ids, offsets, kept = (
        values.unpacked(part, dtype, f"{_MASK}_{name}", problems)
        for part, dtype, name in zip(given, ("<i4", "<i8", "<f4"), ("ids", "offsets", "log_probs"), strict=True)
    )
    return (None, None) if ids is None or offsets is None else (Cut(ids, offsets), kept)


def _entry(given: Any, number: int) -> Any:
    return given[number] if isinstance(given, list) and number < len(given) else None
