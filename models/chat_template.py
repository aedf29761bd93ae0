"""Render the chat templates that come with models: jinja2 in a sandbox, set up as hub templates expect it.

Media in messages and Python functions as tools are left out: tools are the JSON schemas themselves.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(template: str, messages: Any, values: Mapping[str, Any]) -> str:
    """The prompt text of a conversation.

    Args:
      template: jinja2 source.
      messages: a list of mappings with "role" and "content".
      values: further names of the template.
    Raises:
      ValueError: in one line: the messages are none, the template is not valid, or it refuses the messages.
    """
    plain = _checked(messages)
    compiled = _compiled(template)
    try:
        return compiled.render(messages=plain, **values)
    except Exception as error:  # a template is a program: whatever goes wrong in it is its answer to these messages
        raise ValueError(f"the chat template refuses these messages: {_one_line(error)}") from None


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        kind = type(messages).__name__
        raise ValueError(f"messages must be a list of mappings with 'role' and 'content', it is a {kind}")
    if not messages:
        raise ValueError("messages must hold at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] must be a mapping with 'role' and 'content', it is {message!r:.80}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] must have a 'role', a string; it has {message.get('role')!r}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"messages[{index}] must have a 'content' (or 'tool_calls')")
    # Chat APIs write None for what is not there; templates ask whether it is there.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid, line {error.lineno}: {_one_line(error)}") from None
    except RecursionError:
        raise ValueError("the chat template is not valid: it is nested too deeply") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for trainers; for the prompt it is no more than its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    # The sandbox, because templates come with downloaded files.
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
