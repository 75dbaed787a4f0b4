"""Calls of the routes without HTTP or SDKs: what a client may send, and what it reads."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

from tests.unit.areal.agents.scripted_model import Scripted

from areal.agents.calls import Calls
from areal.agents.routes import handle
from areal.agents.session import Model, Session
from areal.types import GenerationHyperparameters
from areal.workflows.rendering import TemplateRenderer

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
FUNCTION = {"name": "f", "description": "Does.", "parameters": SCHEMA}
APIS = ["/chat/completions", "/messages", "/responses"]


def session_of(
    scripted: Scripted, context_length: int | None = None, on_bug: Any = None
) -> Session:
    """A session whose bugs fail the test."""

    def failed(error: Exception) -> None:
        raise error

    model = Model(
        "areal",
        scripted.generate,
        scripted.tokenizer,
        TemplateRenderer(scripted.tokenizer),
        GenerationHyperparameters(max_new_tokens=100_000),
        context_length,
        on_bug or failed,
    )
    return Session("s0", model, Calls())


async def send(session: Session, path: str, body: Any) -> tuple[int, bytes]:
    """Status and body, of a stream all of it."""

    async def find(key: str) -> Session:
        return session

    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await handle(find, "POST", f"/v1{path}", {}, content)
    if reply.parts is None:
        return reply.status, reply.body
    async with aclosing(reply.parts) as parts:
        return reply.status, b"".join([part async for part in parts])


def events_of(content: bytes) -> list[Any]:
    """The JSON of a stream's events; fails for what JavaScript does not read as JSON."""
    lines = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
    return [strict(line) for line in lines if line != b"[DONE]"]


def strict(content: str | bytes) -> Any:
    """As `JSON.parse`: without NaN; integers of any size."""

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(content, parse_constant=refused)


def asking(path: str, stream: bool = False, **more: Any) -> dict[str, Any]:
    """A first request with a tool on offer."""
    if path == "/responses":
        body: dict[str, Any] = {"input": [{"role": "user", "content": "go"}]}
        body["tools"] = [{"type": "function", **FUNCTION}]
    else:
        body = {"messages": [{"role": "user", "content": "go"}]}
        body["tools"] = [{"type": "function", "function": FUNCTION}]
    if path == "/messages":
        tool = {key: value for key, value in FUNCTION.items() if key != "parameters"}
        body |= {"max_tokens": 100_000, "tools": [{**tool, "input_schema": SCHEMA}]}
    return {"model": "any", "stream": stream, **body, **more}


def answer_of(path: str, content: bytes) -> tuple[str, list[tuple[str, str, Any]], list[Any]]:
    """(text, calls as (id, name, arguments), what the client keeps of the answer)."""
    body = strict(content)
    if path == "/chat/completions":
        message = body["choices"][0]["message"]
        calls = [
            (c["id"], c["function"]["name"], strict(c["function"]["arguments"]))
            for c in message.get("tool_calls") or []
        ]
        return message["content"] or "", calls, [message]
    if path == "/messages":
        blocks = body["content"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        calls = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        return text, calls, [{"role": "assistant", "content": blocks}]
    items = body["output"]
    text = "".join(i["content"][0]["text"] for i in items if i["type"] == "message")
    calls = [
        (i["call_id"], i["name"], strict(i["arguments"]))
        for i in items
        if i["type"] == "function_call"
    ]
    return text, calls, items


def continuing(path: str, first: dict[str, Any], kept: list[Any], calls: list[Any]) -> Any:
    """The request that sends back the answer, and a result for each of its calls."""
    key = "input" if path == "/responses" else "messages"
    after: list[Any] = [{"role": "user", "content": "go on"}]
    if calls and path == "/chat/completions":
        after = [{"role": "tool", "tool_call_id": known, "content": "1"} for known, *_ in calls]
    elif calls and path == "/messages":
        results = [
            {"type": "tool_result", "tool_use_id": known, "content": "1"} for known, *_ in calls
        ]
        after = [{"role": "user", "content": results}]
    elif calls:
        after = [
            {"type": "function_call_output", "call_id": known, "output": "1"} for known, *_ in calls
        ]
    return {**first, key: [*first[key], *kept, *after]}
