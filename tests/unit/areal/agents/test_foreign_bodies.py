"""Whatever a client sends, the answer is a valid reply or an error in its API's own format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal.agents.raw_calls import APIS, asking, send, session_of, strict
from tests.unit.areal.agents.scripted_model import Scripted

from areal.agents import session as sessions
from areal.agents.endpoint import Endpoint
from areal.errors import InvalidInput

PATHS = [*APIS, "/completions", "/inference/v1/generate", "/reward"]
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/chat/completions": [
        asking(
            "/chat/completions",
            tool_choice={"type": "function", "function": {"name": "f"}},
            stop=["x"],
            logprobs=True,
            stream_options={"include_usage": True},
            response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        ),
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "go"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ]
        },
    ],
    "/messages": [
        asking("/messages", tool_choice={"type": "any"}, system="s", stop_sequences=["x"]),
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}],
                },
            ],
        },
    ],
    "/responses": [
        asking(
            "/responses",
            tool_choice={"type": "function", "name": "f"},
            metadata={"a": "b"},
            include=["message.output_text.logprobs"],
            instructions="i",
            text={"format": {"type": "text"}},
            max_output_tokens=9,
        ),
        {
            "previous_response_id": None,
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            ],
        },
    ],
    "/completions": [
        {"prompt": "go", "n": 2, "stop": "x", "logprobs": 0, "stream_options": {}},
        {"prompt": [1, 2, 3], "max_tokens": 3},
    ],
    "/inference/v1/generate": [{"token_ids": [1, 2], "sampling_params": {"n": 1, "stop": ["x"]}}],
    "/reward": [{"reward": 1.0, "completion_id": "chatcmpl-s0-0", "parts": {"a": 1}}],
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2**31, 2**40, 10**30, 10**400, 1.5, 1e308, "", "x", "function"])
    | st.sampled_from(["\0", "😀", "user", "text", "auto", "{", "<tool_call>", "x" * 2000]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("type"), inner, max_size=1),
    max_leaves=3,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something may be replaced."""
    found = [path] if path else []
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in pairs:
        found += places(each, (*path, key))
    return found


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a body with another value there."""
    body = json.loads(json.dumps(body))
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return body


def check_error(path: str, content: bytes) -> None:
    """That a body is an error as the path's SDK reads it."""
    body = strict(content)
    error = body["error"]
    assert isinstance(error["message"], str)
    assert len(error["message"]) <= 2000
    assert isinstance(error["type"], str)
    assert (body.get("type") == "error") == (path == "/messages")


@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
async def test_body_when_any_part_is_replaced_then_answered_or_refused(path, data):
    body = data.draw(st.sampled_from(BODIES[path]))
    place = data.draw(st.sampled_from(places(body)))
    body = replaced(body, place, data.draw(JSON))
    if data.draw(st.booleans()) and path != "/reward":
        body["stream"] = True
    scripted = Scripted(*["fine"] * 200)
    session = session_of(scripted)  # whose bugs raise
    status, content = await send(session, path, body)
    if status != 200:
        assert status in (400, 404), content
        check_error(path, content)
        # What is wrong with a request is found before the model works on it.
        assert not scripted.sampled
    elif body.get("stream"):
        assert b'"error":{' not in content


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": 1e999}',
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"a":' * 210 + b"1" + b"}" * 210,
        b'{"a": ' + b"7" * 6000 + b"}",
    ],
)
async def test_body_when_not_json_then_refused_in_the_format_of_the_api(path, content):
    status, answer = await send(session_of(Scripted()), path, content)
    assert status == 400
    check_error(path, answer)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_bug_when_before_any_text_then_status_500_in_the_format_of_the_api(path, stream):
    scripted, bugs = Scripted(), []
    scripted.errors = [ZeroDivisionError("secret")]
    session = session_of(scripted, on_bug=bugs.append)
    status, content = await send(session, path, asking(path, stream))
    assert status == 500
    check_error(path, content)
    assert b"secret" not in content
    assert [type(bug) for bug in bugs] == [ZeroDivisionError]
    # The attempt is not charged with it.
    assert "ZeroDivisionError: secret" in str(session.failure)


@pytest.mark.parametrize("path", APIS)
async def test_bug_when_after_text_then_it_is_the_last_event_of_the_stream(path):
    scripted, bugs = Scripted("Some text that is streamed."), []

    async def step(index: int, end: int) -> None:
        if end == 5:
            raise ZeroDivisionError("secret")

    scripted.step = step
    session = session_of(scripted, on_bug=bugs.append)
    status, content = await send(session, path, asking(path, stream=True))
    assert status == 200
    last = [line for line in content.split(b"\n") if line.startswith(b"data: ")][-1]
    assert "error" in strict(last[6:])
    assert b"secret" not in content
    assert len(bugs) == 1


def test_bug_when_no_one_counts_it_then_it_is_logged(monkeypatch):
    logged = []

    class Log:
        def error(self, event: str, exc_info: Exception) -> None:
            logged.append((event, exc_info))

    monkeypatch.setattr(sessions, "get_logger", lambda name: Log())
    error = ValueError("x")
    sessions.report_bug(error)
    assert logged == [("agent_call_failed", error)]


def test_stop_texts_when_too_many_or_too_long_then_refused():
    from areal.agents.fields import texts

    assert len(texts({"stop": ["x"] * 64}, "stop")) == 64
    for stop in (["x"] * 65, "x" * 1001):
        with pytest.raises(InvalidInput, match="stop: expected at most 64 texts of at most 1000"):
            texts({"stop": stop}, "stop")


@pytest.mark.parametrize("path", APIS)
async def test_endpoint_when_the_body_is_too_large_then_413_in_the_format_of_the_api(
    path, monkeypatch
):
    import aiohttp

    monkeypatch.setattr("areal.agents.endpoint.MAX_BODY_BYTES", 1000)
    async with Endpoint() as endpoint, aiohttp.ClientSession() as http:
        key = endpoint.open(session_of(Scripted()))
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(
            f"{endpoint.base_url}{path}", data=b"x" * 2000, headers=headers
        ) as answer:
            assert answer.status == 413
            check_error(path, await answer.read())
