"""Token ids in, token ids and their supports out: vLLM's `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from serve.api.answers import EventStream, check, json_response, streamed, submit, unless_gone, whole
from serve.api.binary import NPZ, npz_response, prefers_npz
from serve.api.errors import ApiError
from serve.api.fields import Body, SamplingFields, StreamOptions, about, sampling_params
from serve.api.logprobs import prompt_logprobs
from serve.api.masks import MaskFormat, mask_json
from serve.api.service import Service, check_model, new_id
from serve.api.usage import Tally, usage_of
from serve.outputs import CompletionOutput, RequestOutput
from serve.tickets import Ticket

# Media types of answers, for the OpenAPI page.
_KINDS: dict[str, Any] = {
    "application/json": {"schema": {"type": "object"}},
    "text/event-stream": {"schema": {"type": "string"}},
    NPZ: {"schema": {"type": "string", "format": "binary"}},
}
# Fields of vLLM's answers for what this server does not do: clients look them up.
_ABSENT = dict.fromkeys(
    ("prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params")
)


class TokenSampling(SamplingFields):
    """How to sample; the model's own recommendations do not count here."""

    max_tokens: int | None = about("Most tokens of a completion; null: what the context has room for.", minimum=1)
    logprobs: int | None = about("Likeliest tokens to report for each; -1: all that can be.", minimum=-1)
    prompt_logprobs: int | None = about("The same for prompt tokens.", minimum=-1)
    detokenize: bool | None = about("Make text, as stop strings need; true.")


class GenerateBody(Body):
    """A prompt as ids, and how to continue it."""

    token_ids: list[int] = Field(description="The prompt; at least one id of the vocabulary.", min_length=1)
    sampling_params: TokenSampling
    request_id: str | None = about("To abort it by; a new one where left out.")
    model: str | None = about("A name of /v1/models.")
    stream: bool | None = about("Server-sent events, one for each few tokens.")
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] | None = about("text: the choices also hold text.")
    return_token_ids: bool | None = about("Return the prompt's ids.")
    cache_salt: str | None = about("Prompts share their caches with prompts of the same salt only.")
    timeout: float | None = about("Seconds after which the request ends with what it has.", exclusiveMinimum=0)
    sampling_mask_format: MaskFormat | None = about("lists: one list for each token; base64: two arrays.")


class AbortBody(Body):
    """Requests to end."""

    request_ids: list[str]


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(prefix="/inference/v1", tags=["tokens"])

    @routes.post(
        "/generate",
        summary="Continue token ids; the supports of all tokens come back",
        responses={200: {"content": _KINDS}},
    )
    async def generate(body: GenerateBody, http: Request) -> Response:
        check_model(service, body.model)
        is_binary = prefers_npz(http.headers.get("accept"))
        if is_binary and body.stream:
            raise ApiError(400, f"{NPZ} holds whole answers; it cannot be streamed.", "stream")
        tickets = await _tickets(service, body)
        if body.stream:
            return EventStream(_events(service, body, tickets), tickets)
        (output,) = await unless_gone(http, whole(tickets))
        if is_binary:
            return npz_response(_response(service, body, output, is_binary=True), output.outputs)
        return json_response(_response(service, body, output))

    @routes.post("/abort_requests", summary="End requests; they are answered with what they have")
    async def abort_requests(body: AbortBody) -> Response:
        num_ended = service.engine.abort([f"generate-tokens-{name}" for name in body.request_ids])
        return json_response({"status": "aborted", "aborted": num_ended})

    return routes


async def _tickets(service: Service, body: GenerateBody) -> list[Ticket]:
    given = body.sampling_params
    own = {name: getattr(given, name) for name in ("logprobs", "prompt_logprobs", "detokenize")}
    values = {name: value for name, value in own.items() if value is not None}
    params = sampling_params(given, {}, max_tokens=given.max_tokens, **values)
    name = f"generate-tokens-{new_id() if body.request_id is None else body.request_id}"
    if body.output_mode == "text" and service.tokenizer is None:
        raise ApiError(400, "output_mode text needs a tokenizer, which this model does not have.", "output_mode")
    request = check(service, name, body.token_ids, params, is_streamed=bool(body.stream), cache_salt=body.cache_salt)
    return submit(service, [request], body.timeout)


async def _events(service: Service, body: GenerateBody, tickets: list[Ticket]) -> AsyncIterator[dict[str, Any]]:
    options = body.stream_options or StreamOptions()
    tally = Tally(tickets)
    async for number, output in streamed(tickets):
        tally.add(number, output)
        event = _response(service, body, output)
        yield event | {"usage": tally.usage if options.continuous_usage_stats else None}
        if output.finished and options.include_usage:
            yield event | {"choices": [], "usage": tally.usage}


def _response(
    service: Service, body: GenerateBody, output: RequestOutput, *, is_binary: bool = False
) -> dict[str, Any]:
    choice_of = _without_arrays if is_binary else _choice
    num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "request_id": output.request_id,
        "model": service.model_name,
        "created": service.now(),
        "output_mode": body.output_mode or "tokens",
        "usage": usage_of(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens),
        "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
        **_ABSENT,
        "choices": [choice_of(body, completion) for completion in output.outputs],
    }


def _choice(body: GenerateBody, completion: CompletionOutput) -> dict[str, Any]:
    return _ending(body, completion) | {
        "token_ids": completion.token_ids,
        "sampling_mask": mask_json(completion.sampling_mask, body.sampling_mask_format or "lists"),
        "logprobs": _logprobs(completion),
    }


def _without_arrays(body: GenerateBody, completion: CompletionOutput) -> dict[str, Any]:
    # The drawn ids' log-probabilities are an array; those of other ids stay here.
    has_others = bool(body.sampling_params.logprobs)
    return _ending(body, completion) | ({"logprobs": _logprobs(completion)} if has_others else {})


def _ending(body: GenerateBody, completion: CompletionOutput) -> dict[str, Any]:
    choice = {
        "index": completion.index,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "routed_experts": None,
        "weight_versions": [span._asdict() for span in completion.weight_versions],
    }
    return choice | ({"text": completion.text} if body.output_mode == "text" else {})


def _logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    content = []
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        own = entries.get(token_id)
        content.append(
            {
                "token_id": token_id,
                "logprob": None if own is None else own.logprob,
                "rank": None if own is None else own.rank,
                "top_logprobs": [
                    {"token_id": top_id, "logprob": entry.logprob, "rank": entry.rank}
                    for top_id, entry in entries.items()
                ],
            }
        )
    return {"content": content}
