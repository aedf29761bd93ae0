"""Completions out of vLLM's `/inference/v1/generate`: what was asked, and what came back, whole or streamed.

The server must run with `--return-sampling-mask --logprobs-mode processed_logprobs`, and requests ask for `logprobs` (0
is enough). Settings that only take ids away (`min_tokens`, `bad_words`, a grammar) need no replay: the ids are not in
the mask. So only those that change values, or end a completion, are read.

Source: vLLM, entrypoints/scale_out/token_in_token_out/protocol.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmask.answered import Answered, as_params, part, parts
from jaxmask.params import SamplingParams

# JSON knows no infinity; vLLM writes this for it, also of a token that is not in the list it was to be found in.
NO_LOGPROB = -9999.0
_STREAM_END = "[DONE]"
_READ = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_PER_TOKEN = ("token_ids", "sampling_mask")


def completions(requests: Sequence[Any], responses: Sequence[Any]) -> list[list[Answered]]:
    """The choices of each response, by their index.

    Args:
      requests: bodies of the requests, as JSON objects.
      responses: bodies of the answers in the same order; of a streamed one, the list of its events.

    Raises:
      ValueError: not one response for each request, a response that holds an error, or one in which something is
        missing; the message names the response and the choice, both from 0.
    """
    if len(requests) != len(responses):
        raise ValueError(f"requests and responses must be as many, got {len(requests)} and {len(responses)}.")
    return [_choices(*pair, f"response {number}") for number, pair in enumerate(zip(requests, responses, strict=True))]


def sampling_params(request: Any, where: str) -> SamplingParams:
    """The settings of a request that a learner needs, for one completion; vLLM's defaults where it names none."""
    asked = part(request, "sampling_params", where)
    if not isinstance(asked, Mapping):
        raise ValueError(f"'sampling_params' of {where} must be a JSON object, got {asked!r}.")
    given = {name: asked[name] for name in _READ if asked.get(name) is not None}
    return as_params(where, {**given, "max_tokens": None})


def _choices(request: Any, response: Any, where: str) -> list[Answered]:
    whole = _joined(response, where) if isinstance(response, list) else response
    if isinstance(whole, Mapping) and whole.get("error") is not None:
        raise ValueError(f"{where} is an error: {whole['error']!r}.")
    choices = parts(whole, "choices", where)
    # The ids as the server read them, where it was asked to repeat them.
    prompt = parts(whole if whole.get("prompt_token_ids") else request, _prompt_name(whole), where)
    params = sampling_params(request, where.replace("response", "request"))
    names = [f"{where}, choice {number}" for number in range(len(choices))]
    order = [part(choice, "index", name) for choice, name in zip(choices, names, strict=True)]
    if sorted(order) != list(range(len(choices))):
        raise ValueError(f"choices of {where} must have the indices 0 to {len(choices) - 1}, got {order}.")
    by_index = sorted(zip(order, choices, names, strict=True), key=lambda choice: choice[0])
    return [_answered(choice, prompt, params, name) for _, choice, name in by_index]


def _prompt_name(whole: Mapping[str, Any]) -> str:
    return "prompt_token_ids" if whole.get("prompt_token_ids") else "token_ids"


def _answered(choice: Mapping[str, Any], prompt: list[int], params: SamplingParams, name: str) -> Answered:
    content = parts(part(choice, "logprobs", name, "ask with logprobs=0"), "content", f"'logprobs' of {name}")
    values = [part(entry, "logprob", f"'logprobs' of {name}") for entry in content]
    token_ids = parts(choice, "token_ids", name)
    return Answered(
        prompt,
        token_ids,
        [None if value == NO_LOGPROB else value for value in values],
        parts(choice, "sampling_mask", name, "start vLLM with --return-sampling-mask"),
        params,
        _versions(choice.get("weight_versions"), len(token_ids)),
    )


def _versions(spans: Any, length: int) -> list[int | None] | None:
    """The number of the weights behind each token; None where they have names that are no numbers, or none at all."""
    names = [span["version"] for span in spans or ()]
    if not names or not all(str(name).isdecimal() for name in names):
        return None
    versions: list[int | None] = [None] * length
    for span in spans:
        for position in range(max(span["start"], 0), min(span["end"], length)):
            versions[position] = int(span["version"])
    return versions


def _joined(events: list[Any], where: str) -> Mapping[str, Any]:
    """One response out of the events of a stream: each holds the next tokens of some choices."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for number, event in enumerate(events):
        if event == _STREAM_END:
            continue
        name = f"event {number} of {where}"
        pieces = parts(event if isinstance(event, Mapping) and "error" not in event else {}, "choices", name)
        whole = {**event, **{key: value for key, value in whole.items() if value is not None}}
        for piece in pieces:
            index = part(piece, "index", name)
            choices[index] = _longer(choices.get(index), piece, name)
    return {**whole, "choices": list(choices.values())}


def _longer(before: dict[str, Any] | None, piece: Mapping[str, Any], name: str) -> dict[str, Any]:
    if before is None:
        return dict(piece)
    longer = {key: value if value is not None else before.get(key) for key, value in piece.items()}
    for key in _PER_TOKEN:
        longer[key] = [*(before.get(key) or ()), *(piece.get(key) or ())]
    pieces = [logprobs for logprobs in (before.get("logprobs"), piece.get("logprobs")) if logprobs is not None]
    content = itertools.chain.from_iterable(parts(one, "content", f"'logprobs' of {name}") for one in pieces)
    return {**longer, "logprobs": {"content": list(content)} if pieces else None}
