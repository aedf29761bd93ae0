import pytest

from serve.api.conversations import plain_messages


def test_messages_as_templates_expect_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    empty = {"function": {"name": "g", "arguments": ""}}
    given = {"function": {"name": "h", "arguments": {"y": 2}}}
    messages = [
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call, empty, given, {"id": "2"}]},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ]
    assert plain_messages(messages) == [
        {"role": "user", "content": "a\nb", "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                call | {"function": {"name": "f", "arguments": {"x": [1]}}},
                {"function": {"name": "g", "arguments": {}}},
                given,
                {"id": "2"},
            ],
        },
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ]
    assert messages[0]["content"] is parts


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a"}, r"messages\[0\].role must be a text, got None"),
        ({"role": "user", "content": {}}, r"messages\[0\].content must be a text or a list of parts"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\].content must hold parts"),
        ({"role": "user", "content": "a", "tool_calls": ["f"]}, r"messages\[0\].tool_calls must be a list of objects"),
        (
            {"role": "user", "content": "a", "tool_calls": [{"function": {"arguments": "{x"}}]},
            r"messages\[0\].tool_calls must have JSON as arguments, got '{x'",
        ),
    ],
)
def test_messages_that_are_none(message, reason):
    with pytest.raises(ValueError, match=reason):
        plain_messages([message])
