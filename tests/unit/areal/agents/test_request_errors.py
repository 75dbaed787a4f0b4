"""An error of a request names its field, also as `param`, and shows the value that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.areal.agents.raw_calls import asking, send, session_of, strict
from tests.unit.areal.agents.scripted_model import Scripted

CHAT, MESSAGES, RESPONSES, TEXT = "/chat/completions", "/messages", "/responses", "/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
FLAT = {"type": "function", "name": "f"}
CLAUDES = {"name": "f", "input_schema": {}}


def function(**more: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **more}}]


# (path, what replaces a part of a request, the field, what the error shows of the value)
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"tool_choice": False}, "tool_choice", "False"),
    (CHAT, {"tool_choice": ""}, "tool_choice", "''"),
    (CHAT, {"tool_choice": {}}, "tool_choice.type", "none"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "none"),
    (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name",
     "none"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
    (CHAT, {"tools": function(name="")}, "tools[0].function.name", "''"),
    (CHAT, {"tools": function() * 2}, "tools[1].function.name", "'f'"),
    (CHAT, {"tools": function(parameters="x")}, "tools[0].function.parameters", "'x'"),
    (CHAT, {"logprobs": "yes"}, "logprobs", "'yes'"),
    (CHAT, {"logprobs": 2}, "logprobs", "2"),
    (CHAT, {"return_token_ids": "x"}, "return_token_ids", "'x'"),
    (CHAT, {"stream_options": {"bogus": 1}}, "stream_options.bogus", "'1'"),
    (CHAT, {"stream_options": {"include_usage": "x"}}, "stream_options.include_usage", "'x'"),
    (CHAT, {"stop": 5}, "stop", "5"),
    (CHAT, {"stop": [None]}, "stop", "[None]"),
    (CHAT, {"bogus": 1}, "bogus", "'1'"),
    (CHAT, {"n": 0}, "n", "0"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    (CHAT, {"messages": []}, "messages", ""),
    (TEXT, {"logprobs": "yes"}, "logprobs", "'yes'"),
    (TEXT, {"stream_options": {"bogus": 1}}, "stream_options.bogus", "'1'"),
    (TEXT, {"prompt": 5}, "prompt", "5"),
    (RESPONSES, {"tool_choice": False}, "tool_choice", "False"),
    (RESPONSES, {"tool_choice": {"type": "function"}}, "tool_choice.name", "none"),
    (RESPONSES, {"tools": [{**FLAT, "name": ""}]}, "tools[0].name", "''"),
    (RESPONSES, {"tools": [FLAT, FLAT]}, "tools[1].name", "'f'"),
    (RESPONSES, {"tools": [{**FLAT, "parameters": "x"}]}, "tools[0].parameters", "'x'"),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name", "none"),
    (MESSAGES, {"tools": [{**CLAUDES, "name": ""}]}, "tools[0].name", "''"),
    (MESSAGES, {"tools": [CLAUDES, CLAUDES]}, "tools[1].name", "'f'"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "field", "value"), WRONG)
async def test_field_when_wrong_then_the_error_names_it_and_shows_the_value(
    path, more, field, value
):
    body = {"prompt": "go", **more} if path == TEXT else {**asking(path), **more}
    scripted = Scripted("ok")
    status, content = await send(session_of(scripted), path, body)
    assert status == 400
    error = strict(content)["error"]
    assert error["message"].startswith(field)
    assert value in error["message"]
    if path != MESSAGES:  # Anthropic's errors have no such field
        assert error["param"] == field
    assert not scripted.requests


@pytest.mark.parametrize("content", [b"{", b"[]"])
async def test_body_when_it_is_no_object_then_no_field_is_named(content):
    _, answer = await send(session_of(Scripted()), CHAT, content)
    assert strict(answer)["error"]["param"] is None


async def test_response_when_unknown_then_the_field_is_named():
    body = {"input": "hi", "previous_response_id": "junk"}
    status, content = await send(session_of(Scripted()), RESPONSES, body)
    assert (status, strict(content)["error"]["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": None, "tools": None, "logprobs": None, "stream_options": None},
        {"logprobs": False, "tools": [TOOL], "tool_choice": "auto", "tools_": None},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
async def test_fields_when_null_or_right_then_answered(more):
    body = {**asking(CHAT), **{key: value for key, value in more.items() if key != "tools_"}}
    status, content = await send(session_of(Scripted("ok")), CHAT, body)
    assert status == 200, content
