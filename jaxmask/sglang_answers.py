"""Completions out of SGLang's `/generate`: what was asked with `return_sampling_mask`, and what came back.

Of the settings that change values, the temperature alone is replayed. Penalties and biases are refused: in which order
SGLang applies them, and to what, differs between its versions. What only takes ids away needs no replay.

Source: SGLang, pull requests 27408, 33593 and 40932.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmask.answered import Answered, as_params, part, parts
from jaxmask.params import SamplingParams

_READ = ("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos")
# With the values at which they change nothing.
_NOT_REPLAYED: tuple[tuple[str, Any], ...] = (
    ("repetition_penalty", 1),
    ("frequency_penalty", 0),
    ("presence_penalty", 0),
    ("logit_bias", {}),
)
_ASK = "ask with return_sampling_mask"


def completions(requests: Sequence[Any], responses: Sequence[Any]) -> list[list[Answered]]:
    """The completions of each request.

    Args:
      requests: bodies of the requests, as JSON objects with `input_ids` of one prompt and its `sampling_params`.
      responses: bodies of the answers in the same order: an object, or a list of them where n was above 1.

    Raises:
      ValueError: not one response for each request, a setting that cannot be replayed, no word on the temperature, or
        a response in which something is missing; the message names request or response and completion, from 0.
    """
    if len(requests) != len(responses):
        raise ValueError(f"requests and responses must be as many, got {len(requests)} and {len(responses)}.")
    answered = []
    for number, (request, response) in enumerate(zip(requests, responses, strict=True)):
        prompt = parts(request, "input_ids", f"request {number}")
        params = sampling_params(request, f"request {number}")
        several = response if isinstance(response, list) else [response]
        names = [f"response {number}, completion {index}" for index in range(len(several))]
        answered.append([_answered(one, prompt, params, name) for one, name in zip(several, names, strict=True)])
    return answered


def sampling_params(request: Any, where: str) -> SamplingParams:
    """The settings of a request that a learner needs, for one completion."""
    asked = part(request, "sampling_params", where)
    # A silent request takes what the server was started with, or what the model's files say.
    part(asked, "temperature", f"'sampling_params' of {where}")
    for name, neutral in _NOT_REPLAYED:
        if asked.get(name) not in (None, neutral):
            raise ValueError(f"{where} was sampled with {name}={asked[name]!r}, which cannot be replayed.")
    given = {name: asked[name] for name in _READ if asked.get(name) is not None}
    return as_params(where, {**given, "max_tokens": None})


def _answered(response: Any, prompt: list[int], params: SamplingParams, name: str) -> Answered:
    token_ids = parts(response, "output_ids", name)
    told = part(response, "meta_info", name)
    where = f"'meta_info' of {name}"
    supports = parts(told, "output_token_sampling_mask", where, _ASK)
    values = parts(told, "output_token_sampling_logprobs", where, _ASK)
    if any(isinstance(value, (list, tuple)) for value in values):
        values = _of_sampled(token_ids, supports, values, name)
    version = told.get("weight_version")
    versions = [int(version)] * len(token_ids) if version is not None and str(version).isdecimal() else None
    return Answered(prompt, token_ids, values, supports, params, versions)


def _of_sampled(token_ids: list[int], supports: list[Any], lists: list[Any], name: str) -> list[float]:
    """Some servers send the log-probability of every kept id, beside the mask."""
    values = []
    for position, entry in enumerate(zip(token_ids, supports, lists, strict=False)):
        token_id, support, kept = entry
        if not isinstance(support, Sequence) or not isinstance(kept, Sequence) or len(support) != len(kept):
            raise ValueError(f"{name}, position {position}: a support and its log-probabilities must be equally long.")
        if token_id not in support:
            raise ValueError(f"{name}, position {position}: sampled id {token_id} lies outside its support {support}.")
        values.append(kept[list(support).index(token_id)])
    return values
