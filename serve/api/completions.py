"""Text in, text and its supports out: OpenAI's `/v1/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, field_validator

from serve.api.answers import EventStream, json_response, streamed, submit, unless_gone, whole
from serve.api.fields import about
from serve.api.logprobs import Offsets, TokenTexts, completion_logprobs, prompt_logprobs
from serve.api.masks import mask_json
from serve.api.openai_fields import OpenAIFields, response_head
from serve.api.prompts import checked_requests, listed_prompts, require_tokenizer
from serve.api.service import Service, check_model
from serve.api.usage import Tally
from serve.outputs import CompletionOutput, RequestOutput
from serve.tickets import Ticket

_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}


class CompletionBody(OpenAIFields):
    """Prompts, and how to continue them."""

    prompt: Annotated[Any, Field(json_schema_extra=_PROMPT_SCHEMA, description="A text, its ids, or a list of such.")]
    max_tokens: int | None = about("Most tokens of a completion; 16. 0: with echo, none at all.", minimum=0)
    logprobs: int | None = about("Likeliest tokens to report for each; -1: all that can be.", minimum=-1)
    echo: bool | None = about("Begin the text with the prompt.")

    @field_validator("prompt")
    @classmethod
    def check_prompt(cls, prompt: Any) -> list[str | list[int]]:
        """All prompts."""
        return listed_prompts(prompt)

    @property
    def is_echo_alone(self) -> bool:
        """Whether nothing is to be drawn."""
        return bool(self.echo) and self.max_tokens == 0


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])

    @routes.post("/completions", summary="Continue texts")
    async def complete(body: CompletionBody, http: Request) -> Response:
        check_model(service, body.model)
        name = body.name("cmpl")
        answer = _Answer(service, body, name, await _tickets(service, body, name))
        if body.stream:
            return EventStream(answer.events(), answer.tickets)
        return json_response(answer.response(await unless_gone(http, whole(answer.tickets))))

    return routes


async def _tickets(service: Service, body: CompletionBody, name: str) -> list[Ticket]:
    if body.echo:
        require_tokenizer(service, "echo")
    # Nothing is drawn where the prompt alone is asked for; the engine draws a token to read the prompt.
    max_tokens = 1 if body.is_echo_alone else body.max_tokens
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    params = body.params(service.defaults, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)
    return submit(service, await checked_requests(service, name, body.prompt, params, body), body.timeout)


class _Answer:
    """The answer to a request while it comes: a choice for each completion of each prompt."""

    def __init__(self, service: Service, body: CompletionBody, name: str, tickets: Sequence[Ticket]):
        self.tickets = tickets
        self._service, self._body = service, body
        self._head = response_head(service, name, "text_completion")
        self._choices = [
            _Choice(service, body, ticket, number * ticket.request.params.n + index)
            for number, ticket in enumerate(tickets)
            for index in range(ticket.request.params.n)
        ]
        self._tally = Tally(tickets)

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """All of it."""
        choices = [choice for number, output in enumerate(outputs) for choice in self._take(number, output)]
        details = {"service_tier": None, "system_fingerprint": None}
        return self._head | {"choices": choices, "usage": self._tally.usage} | details

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """One event for each piece of a choice."""
        options = self._body.stream_options
        with_each = bool(options and options.continuous_usage_stats)
        async for number, output in streamed(self.tickets):
            for choice in self._take(number, output):
                yield self._head | {"choices": [choice]} | ({"usage": self._tally.usage} if with_each else {})
        if options and options.include_usage:
            yield self._head | {"choices": [], "usage": self._tally.usage}

    def _take(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        if self._body.is_echo_alone:
            output = dataclasses.replace(output, outputs=[_without_tokens(one) for one in output.outputs])
        self._tally.add(number, output)
        first = number * self.tickets[number].request.params.n
        return [self._choices[first + one.index].write(output, one) for one in output.outputs]


class _Choice:
    """One choice while it comes."""

    def __init__(self, service: Service, body: CompletionBody, ticket: Ticket, number: int):
        self._body, self._request, self._number = body, ticket.request, number
        self._tokenizer = service.tokenizer
        self._texts = TokenTexts(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self._offsets: Offsets | None = None

    def write(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """The choice, or its next piece; the first begins with the prompt, where that is asked for."""
        is_first = self._offsets is None
        text, token_ids, entries, offsets = self._begin(output) if is_first else ("", [], [], [])
        if completion.logprobs is not None:
            assert self._offsets is not None
            token_ids, entries = token_ids + completion.token_ids, entries + completion.logprobs
            offsets = offsets + self._offsets.of(completion.token_ids)
        has_logprobs = completion.logprobs is not None
        return {
            "index": self._number,
            "text": text + completion.text,
            "logprobs": completion_logprobs(self._texts, token_ids, entries, offsets) if has_logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._body.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if is_first else None,
            "prompt_token_ids": output.prompt_token_ids if self._body.return_token_ids and is_first else None,
            "sampling_mask": mask_json(completion.sampling_mask, self._body.sampling_mask_format or "lists"),
            "weight_versions": [span._asdict() for span in completion.weight_versions],
        }

    def _begin(self, output: RequestOutput) -> tuple[str, list[int], list[Any], list[int]]:
        """The prompt's text, ids, entries and offsets, where they are to be in the choice."""
        skips = self._request.params.skip_special_tokens
        if not self._body.echo:
            self._offsets = Offsets(self._tokenizer, skips)
            return "", [], [], []
        token_ids, text = output.prompt_token_ids, output.prompt
        if text is None:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skips)
            offsets = Offsets(self._tokenizer, skips).of(token_ids)
        else:
            # Special tokens that were written out are part of the text; a BOS before it is not.
            offsets = Offsets(self._tokenizer, skip_special_tokens=False).of(token_ids)
            shift = len(self._tokenizer.decode(token_ids, skip_special_tokens=False)) - len(text)
            offsets = [max(offset - shift, 0) for offset in offsets]
        self._offsets = Offsets(self._tokenizer, skips, begin=len(text))
        return text, token_ids, output.prompt_logprobs or [None] * len(token_ids), offsets


def _without_tokens(completion: CompletionOutput) -> CompletionOutput:
    mask = completion.sampling_mask
    return dataclasses.replace(
        completion,
        text="",
        token_ids=[],
        logprobs=None if completion.logprobs is None else [],
        sampling_mask=None if mask is None else mask[:0],
        finish_reason="length" if completion.finish_reason == "stop" else completion.finish_reason,
        stop_reason=None,
        weight_versions=[],
    )
