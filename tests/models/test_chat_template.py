import json
import re

import pytest

from models.chat_template import render

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for message in messages %}\n  {{ message['content'] }}\n{% endfor %}", "  Hi\n"),
        ("{% for message in messages %}{% break %}{% endfor %}{{ messages | tojson }}", json.dumps(HELLO)),
        ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": "<é>"\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{{ strftime_now('%Y') | length }}{{ nothing }}", "4"),
    ],
)
def test_templates_find_what_the_hub_gives_them(template, expected):
    assert render(template, HELLO, {}) == expected


def test_what_is_none_is_not_there():
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    assert render("{{ messages[0].keys() | list }}", [message], {}) == "['role', 'tool_calls']"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('must\nalternate') }}",
            "the chat template refuses these messages: must alternate",
        ),
        ("{{ messages.append(1) }}", "refuses these messages: .*append"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: .*unsafe"),
        ("{{ 'a' + none }}", "refuses these messages: can only concatenate"),
        ("{{ 1 // 0 }}", "refuses these messages: .*zero"),
        ("{{ messages[7].content }}", "refuses these messages: .*no element 7"),
        ("\n\n{% if %}", "the chat template is not valid, line 3: Expected an expression"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "the chat template is not valid: it is nested too deeply"),
        ("{{ 1 | nosuch }}", "the chat template is not valid, line 1: No filter named 'nosuch'"),
    ],
)
def test_templates_that_fail_or_reach_out_say_why_in_one_line(template, message):
    with pytest.raises(ValueError, match=message) as raised:
        render(template, HELLO, {})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list of mappings with 'role' and 'content', it is a str"),
        (HELLO[0], "it is a dict"),
        (None, "it is a NoneType"),
        ([], "at least one message"),
        (["Hi"], "messages[0] must be a mapping with 'role' and 'content', it is 'Hi'"),
        ([*HELLO, {"content": "Hi"}], "messages[1] must have a 'role', a string; it has None"),
        ([{"role": 1, "content": "Hi"}], "messages[0] must have a 'role', a string; it has 1"),
        ([{"role": "user"}], "messages[0] must have a 'content' (or 'tool_calls')"),
        ([{"role": "user", "content": None}], "messages[0] must have a 'content'"),
    ],
)
def test_what_are_no_messages_is_refused(messages, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        render("{{ messages }}", messages, {})
