"""Chat messages to prompts: OpenAI's shapes in, what the model's chat template makes of them out.

Images and sound are left out: a part of a message that is no text is refused.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from serve.api.errors import ApiError, bad_request
from serve.api.fields import Body, about
from serve.api.prompts import off_loop_if_long, require_tokenizer
from serve.api.service import Service

Message = dict[str, Any]
_BOTH = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
_RESERVED = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        },
        "required": ["role"],
    },
}


class TemplateFields(Body):
    """What a chat template is told besides the messages."""

    add_generation_prompt: bool | None = about("End the prompt with the opening of a reply; true.")
    continue_final_message: bool | None = about("Let the reply go on with the last message; false.")
    chat_template_kwargs: dict[str, Any] | None = about("Further names of the chat template.")
    tools: list[dict[str, Any]] | None = about("JSON schemas that the chat template may describe.")


@dataclasses.dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as the model reads it.

    Attributes:
      text: what the chat template wrote, BOS included where it writes one.
      token_ids: of the text.
    """

    text: str
    token_ids: list[int]


async def render(
    service: Service, messages: Sequence[Message], fields: TemplateFields, add_special_tokens: bool
) -> RenderedPrompt:
    """The prompt of a conversation.

    Args:
      service: the server's.
      messages: as they came.
      fields: of the template.
      add_special_tokens: put the model's BOS before what the template wrote.

    Raises:
      ApiError: 400: there is no tokenizer or chat template, or that refuses the messages.
    """
    tokenizer = require_tokenizer(service, "chat")
    if fields.continue_final_message and fields.add_generation_prompt is not False:
        if fields.add_generation_prompt:
            raise ApiError(400, _BOTH, "continue_final_message")
        fields = fields.model_copy(update={"add_generation_prompt": False})

    def read() -> RenderedPrompt:
        text = _text(tokenizer, plain_messages(messages), fields)
        return RenderedPrompt(text, tokenizer.encode(text, add_special_tokens=add_special_tokens))

    num_characters = sum(len(part) for message in messages for part in _strings(message))
    with bad_request():
        return await off_loop_if_long(num_characters, read)


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as chat templates expect them: contents as one text each, arguments of tool calls as objects.

    Raises:
      ValueError: a message that is none, or holds something else than text.
    """
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain(name: str, message: Message) -> Message:
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{name}.role must be a text, got {message.get('role')!r:.100}")
    content = message.get("content")
    if content is not None:
        content = _content(f"{name}.content", content)
    changes: Message = {"content": content}
    if message.get("tool_calls") is not None:
        changes["tool_calls"] = _tool_calls(f"{name}.tool_calls", message["tool_calls"])
    return message | changes


def _content(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{name} must be a text or a list of parts, got {content!r:.100}")
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            raise ValueError(f'{name} must hold parts {{"type": "text", "text": ...}} alone, got {part!r:.100}')
    return "\n".join(part["text"] for part in content)


def _tool_calls(name: str, calls: Any) -> list[Message]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{name} must be a list of objects, got {calls!r:.100}")
    return [call | {"function": _function(name, call["function"])} if "function" in call else call for call in calls]


def _function(name: str, function: Any) -> Any:
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return function
    try:
        return function | {"arguments": json.loads(arguments or "{}")}
    except ValueError:
        raise ValueError(f"{name} must have JSON as arguments, got {arguments!r:.100}") from None


def _text(tokenizer: Any, messages: list[Message], fields: TemplateFields) -> str:
    values = dict(fields.chat_template_kwargs or {})
    reserved = [name for name in _RESERVED if name in values]
    if reserved:
        raise ValueError(f"chat_template_kwargs must not hold {reserved[0]!r}, which has another place")
    if fields.tools:
        values["tools"] = fields.tools
    if fields.continue_final_message:
        return _continued(tokenizer, messages, values)
    is_opened = fields.add_generation_prompt is not False
    return tokenizer.apply_chat_template(messages, add_generation_prompt=is_opened, **values)


def _continued(tokenizer: Any, messages: list[Message], values: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's content, which a mark finds that no text holds."""
    last, mark = messages[-1], uuid.uuid4().hex
    if not isinstance(last.get("content"), str):
        raise ValueError("continue_final_message needs a last message with a text")
    marked = [*messages[:-1], last | {"content": last["content"] + mark}]
    text = tokenizer.apply_chat_template(marked, add_generation_prompt=False, **values)
    before, found, _ = text.rpartition(mark)
    if not found:
        raise ValueError("continue_final_message cannot be done: the chat template changes the last message")
    return before


def _strings(message: Message) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]
