"""Messages in, replies and their supports out: OpenAI's `/v1/chat/completions`.

Tools are shown to the model; its calls of them stay text, as it writes them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from serve.api.answers import EventStream, check, json_response, streamed, submit, unless_gone, whole
from serve.api.conversations import MESSAGES_SCHEMA, TemplateFields, render
from serve.api.errors import ApiError
from serve.api.fields import about
from serve.api.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from serve.api.masks import mask_json
from serve.api.openai_fields import OpenAIFields, response_head
from serve.api.service import Service, check_model
from serve.api.usage import Tally
from serve.outputs import CompletionOutput, RequestOutput
from serve.tickets import Ticket


class ChatBody(OpenAIFields, TemplateFields):
    """A conversation, and how to reply."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, json_schema_extra=MESSAGES_SCHEMA)]
    max_completion_tokens: int | None = about("Most tokens of a reply; what the context has room for.", minimum=1)
    max_tokens: int | None = about("The same; max_completion_tokens goes before it.", minimum=1)
    logprobs: bool | None = about("Report the log-probability of each token; false.")
    top_logprobs: int | None = about("And of so many of the likeliest ones; -1: all. 0.", minimum=-1)
    tool_choice: Any = about('"none" or "auto": the model sees the tools, and its text is not read for calls.')


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])

    @routes.post("/chat/completions", summary="Reply to messages")
    async def reply(body: ChatBody, http: Request) -> Response:
        check_model(service, body.model)
        name = body.name("chatcmpl")
        answer = _Answer(service, body, name, await _ticket(service, body, name))
        if body.stream:
            return EventStream(answer.events(), [answer.ticket])
        (output,) = await unless_gone(http, whole([answer.ticket]))
        return json_response(answer.response(output))

    return routes


async def _ticket(service: Service, body: ChatBody, name: str) -> Ticket:
    if body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, f'tool_choice must be "none" or "auto", got {body.tool_choice!r:.100}.', "tool_choice")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    # What the context has room for, unless the model recommends another limit.
    defaults = {"max_tokens": None, **service.defaults}
    params = body.params(defaults, max_tokens=max_tokens, logprobs=num_logprobs)
    prompt = await render(service, body.messages, body, bool(body.add_special_tokens))
    request = check(
        service,
        name,
        prompt.token_ids,
        params,
        is_streamed=bool(body.stream),
        text=prompt.text,
        cache_salt=body.cache_salt,
    )
    return submit(service, [request], body.timeout)[0]


class _Answer:
    """The answer to a request while it comes: a choice for each reply."""

    def __init__(self, service: Service, body: ChatBody, name: str, ticket: Ticket):
        self.ticket = ticket
        self._service, self._body, self._name = service, body, name
        self._texts = TokenTexts(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self._tally = Tally([ticket])

    def response(self, output: RequestOutput) -> dict[str, Any]:
        """All of it."""
        self._tally.add(0, output)
        choices = [{"message": _message(one.text)} | self._choice(one) for one in output.outputs]
        head = response_head(self._service, self._name, "chat.completion")
        details = {"service_tier": None, "system_fingerprint": None}
        return head | {"choices": choices, "usage": self._tally.usage} | details | self._prompt(output)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The role of each choice, then one event for each piece of one."""
        options = self._body.stream_options
        head = response_head(self._service, self._name, "chat.completion.chunk")
        begun: set[int] = set()
        async for _, output in streamed([self.ticket]):
            self._tally.add(0, output)
            usage = {"usage": self._tally.usage} if options and options.continuous_usage_stats else {}
            for one in output.outputs:
                if one.index not in begun:
                    own = {} if begun else self._prompt(output)
                    yield head | {"choices": [_opening(one.index)]} | own | usage
                    begun.add(one.index)
                piece = {"delta": {"content": one.text}} | self._choice(one)
                yield head | {"choices": [piece]} | usage
        if options and options.include_usage:
            yield head | {"choices": [], "usage": self._tally.usage}

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if completion.logprobs is not None:
            num = self._body.top_logprobs or 0
            logprobs = chat_logprobs(self._texts, completion.token_ids, completion.logprobs, num)
        return {
            "index": completion.index,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._body.return_token_ids else None,
            "sampling_mask": mask_json(completion.sampling_mask, self._body.sampling_mask_format or "lists"),
            "weight_versions": [span._asdict() for span in completion.weight_versions],
        }

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
            "prompt_token_ids": output.prompt_token_ids if self._body.return_token_ids else None,
        }


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}


def _opening(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
