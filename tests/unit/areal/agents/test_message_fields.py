"""Nothing in a history is dropped: it is rendered, is known to mean nothing, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.areal.agents.raw_calls import send, session_of, strict
from tests.unit.areal.agents.scripted_model import Scripted

CHAT, MESSAGES, RESPONSES = "/chat/completions", "/messages", "/responses"
USER = {"role": "user", "content": "go"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "42"}


async def prompt_of(path: str, history: list[Any], **more: Any) -> str:
    """The prompt that a history is rendered as."""
    scripted = Scripted("ok", family="qwen3")
    key = "input" if path == RESPONSES else "messages"
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    status, content = await send(session_of(scripted), path, {key: history, **limit, **more})
    assert status == 200, content
    return scripted.tokenizer.decode(scripted.requests[0].input_ids)


def rendered(*messages: Any) -> str:
    return Scripted(family="qwen3").tokenizer.render_chat(messages)


THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}
EXPECTED = rendered(USER, THOUGHT, RESULT)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
async def test_reasoning_when_the_history_is_rendered_then_the_template_gets_it(name):
    said = {"role": "assistant", "content": None, name: "Hm.", "tool_calls": [CALL]}
    assert await prompt_of(CHAT, [USER, said, RESULT]) == EXPECTED
    assert "<think>\nHm.\n</think>" in EXPECTED


async def test_thinking_when_the_history_is_rendered_then_the_template_gets_it():
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "42"}
    history = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    assert await prompt_of(MESSAGES, history) == EXPECTED


@pytest.mark.parametrize("name", ["content", "summary"])
async def test_reasoning_item_when_the_history_is_rendered_then_the_template_gets_it(name):
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "r", "summary": [], name: [{"type": "x", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    assert await prompt_of(RESPONSES, items) == EXPECTED


async def test_reasoning_when_kept_then_a_history_with_other_instructions_has_it():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    scripted = Scripted(f"<think>Hm.</think>{call}", "done", family="qwen3")
    session = session_of(scripted)
    _, content = await send(session, RESPONSES, {"input": "go", "tools": [TOOL], "store": True})
    answer = strict(content)
    known = next(item["call_id"] for item in answer["output"] if item["type"] == "function_call")
    more = {"previous_response_id": answer["id"], "instructions": "New.", "tools": [TOOL]}
    output = {"type": "function_call_output", "call_id": known, "output": "42"}
    status, content = await send(session, RESPONSES, {"input": [output], **more})
    assert status == 200, content
    assert "<think>\nHm.\n</think>" in scripted.tokenizer.decode(scripted.requests[1].input_ids)


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [("boom", "error: boom"), ("Error: boom", "Error: boom"), (None, "error: ")],
)
async def test_result_when_it_is_an_error_then_its_text_says_so(content, expected):
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": True}
    history = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert f"<tool_response>\n{expected}\n</tool_response>" in await prompt_of(MESSAGES, history)


async def test_fields_when_they_come_back_from_an_answer_then_they_change_nothing():
    said = {
        "role": "assistant", "content": "A", "refusal": None, "audio": None, "annotations": [],
        "function_call": None, "tool_calls": None, "reasoning_content": None,
    }  # fmt: skip
    plain = await prompt_of(CHAT, [USER, {"role": "assistant", "content": "A"}, USER])
    assert await prompt_of(CHAT, [USER, said, USER]) == plain
    parts = [{"type": "text", "text": "A", "citations": None, "cache_control": {"type": "x"}}]
    turns = [USER, {"role": "assistant", "content": parts}, USER]
    assert await prompt_of(MESSAGES, turns) == plain
    parts = [{"type": "output_text", "text": "A", "annotations": [], "logprobs": []}]
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    assert await prompt_of(RESPONSES, [USER, {**item, "content": parts}, USER]) == plain


ASSISTANT = {"role": "assistant", "content": "A"}
REFUSED = [
    (CHAT, {**USER, "bogus": 1}, "messages[0].bogus"),
    (CHAT, {**USER, "tool_calls": [CALL]}, "messages[0].tool_calls"),
    (CHAT, {**USER, "tool_call_id": "c"}, "messages[0].tool_call_id"),
    (CHAT, {**USER, "reasoning_content": "Hm."}, "messages[0].reasoning_content"),
    (CHAT, {**ASSISTANT, "reasoning_content": 5}, "messages[0].reasoning_content"),
    (CHAT, {**ASSISTANT, "refusal": "no"}, "messages[0].refusal"),
    (CHAT, {**ASSISTANT, "audio": {"id": "x"}}, "messages[0].audio"),
    (CHAT, {**ASSISTANT, "annotations": [{}]}, "messages[0].annotations"),
    (CHAT, {**ASSISTANT, "tool_calls": [{**CALL, "bogus": 1}]}, "messages[0].tool_calls[0].bogus"),
    (CHAT, {**USER, "content": [{"type": "text", "text": "x", "bogus": 1}]},
     "messages[0].content[0].bogus"),
    (CHAT, {**USER, "content": 5}, "messages[0].content"),
    (MESSAGES, {**USER, "bogus": 1}, "messages[0].bogus"),
    (MESSAGES, {**USER, "content": [{"type": "text", "text": "x", "bogus": 1}]},
     "messages[0].content[0].bogus"),
    (MESSAGES, {**USER, "content": [{"type": "thinking", "thinking": "x"}]},
     "messages[0].content[0]"),
    (MESSAGES, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "x": 1}]},
     "messages[0].content[0].x"),
    (RESPONSES, {**USER, "bogus": 1}, "input[0].bogus"),
    (RESPONSES, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "x": 1},
     "input[0].x"),
    (RESPONSES, {"type": "reasoning", "content": [{}]}, "input[0].content[0].text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "message", "field"), REFUSED)
async def test_field_when_it_would_be_dropped_then_refused_by_name(path, message, field):
    scripted = Scripted("ok", family="qwen3")
    history = {"input": [message, USER]} if path == RESPONSES else {"messages": [message, USER]}
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    status, content = await send(session_of(scripted), path, {**history, **limit})
    assert status == 400
    assert strict(content)["error"]["message"].startswith(field)
    assert not scripted.requests


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_reasoning_when_in_a_message_that_continues_then_refused(path):
    said: dict[str, Any] = {**ASSISTANT, "reasoning_content": "Hm.", "prefix": True}
    if path == MESSAGES:
        blocks = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "A"}]
        said = {"role": "assistant", "content": blocks}
    body = {"messages": [USER, said], "max_tokens": 9}
    status, content = await send(session_of(Scripted("ok", family="qwen3")), path, body)
    assert status == 400, content
