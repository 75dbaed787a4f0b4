"""The HTTP routes that agents call, without an HTTP server: a request in, a reply out.

| route | is |
|---|---|
| `POST /v1/chat/completions`, `/v1/completions`, `/v1/responses`, `GET /v1/models` | OpenAI's |
| `POST /v1/messages` | Anthropic's |
| `POST /inference/v1/generate` | tokens in, tokens out |
| `POST /v1/reward` | `{"reward": 1.0}` for the session; with `"completion_id"` for one answer |
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from areal.agents.chat import Answer
from areal.agents.fields import body_of, get, number, number_of
from areal.agents.session import Session
from areal.errors import (
    ArealError,
    CapacityExceeded,
    InvalidInput,
    LeaseLost,
    NotFound,
    Unauthenticated,
    Unavailable,
    WaitTimeout,
)
from areal.workflows.rendering import Message

_STATUS: dict[type[ArealError], tuple[int, str]] = {
    InvalidInput: (400, "invalid_request_error"),
    Unauthenticated: (401, "authentication_error"),
    NotFound: (404, "not_found_error"),
    LeaseLost: (410, "session_ended"),
    CapacityExceeded: (429, "rate_limit_error"),
    Unavailable: (503, "overloaded_error"),
    WaitTimeout: (504, "timeout_error"),
}


Answering = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Answers a route of its own."""


@dataclass(frozen=True)
class Reply:
    """A reply, as it is sent over HTTP."""

    status: int
    body: bytes
    stream: bool = False
    """Whether `body` is server-sent events."""
    headers: Mapping[str, str] = field(default_factory=dict)
    sent: Callable[[], Awaitable[None]] | None = None
    """Await it once the whole reply is sent."""


async def handle(
    find: Callable[[str], Awaitable[Session]],
    method: str,
    path: str,
    headers: Mapping[str, str],
    content: bytes,
    own: Mapping[tuple[str, str], Answering] | None = None,
) -> Reply:
    """Answers a request; each of our errors is translated to the error format of that API.

    Args:
        find: The session of an API key; raises Unauthenticated.
        method: The HTTP method, in upper case.
        path: Begins with /v1 once, twice (SDKs differ in what they append) or not at all.
        headers: Header names in any case.
        content: The body.
        own: Other routes, by method and path: body of a request to body of the answer.
    """
    names = {name.lower(): value for name, value in headers.items()}
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    try:
        key = names.get("authorization", "").removeprefix("Bearer ") or names.get("x-api-key", "")
        session = await find(key)
        if answering := (own or {}).get((method, path)):
            return _json(await answering(body_of(content) if content.strip() else {}))
        return await _route(session, method, path, names, content)
    except ArealError as error:
        status, kind = next((v for k, v in _STATUS.items() if isinstance(error, k)), (500, "error"))
        said: dict[str, Any] = {"message": str(error), "type": kind}
        body: dict[str, Any] = {"error": said | {"param": None, "code": None}}
        if path == "/messages":
            body = {"type": "error", "error": said}
        more = {}
        if isinstance(error, CapacityExceeded):
            more["Retry-After"] = str(math.ceil(error.retry_after_s or 1))
        return Reply(status, orjson.dumps(body), headers=more)


async def _route(
    session: Session, method: str, path: str, headers: Mapping[str, str], content: bytes
) -> Reply:
    if (method, path) == ("GET", "/models"):
        model = {"id": session.model.name, "object": "model", "created": 0, "owned_by": "areal"}
        return _json({"object": "list", "data": [model]})
    route = _POSTS.get(path.removeprefix("/inference/v1")) if method == "POST" else None
    if route is None:
        raise NotFound(f"{method} {path}: there is no such route")
    retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
    return await route(session, body_of(content), retry)


async def _chat(session: Session, body: dict[str, Any], retry: bool) -> Reply:
    from areal.agents import openai_chat as api

    answers = await session.chat(api.read_request(body), retry=retry)
    known = _id("chatcmpl", session, answers)
    told = (known, session.model.name, answers, body, session.model.tokenizer)
    if get(body, "stream", bool):
        return _events(session, answers, api.write_events(*told))
    return _json(api.write_completion(*told), session, answers)


async def _completions(session: Session, body: dict[str, Any], retry: bool) -> Reply:
    from areal.agents import openai_text as api

    answers = await session.complete(
        **api.read_text_request(body, session.model.tokenizer), retry=retry
    )
    known = _id("cmpl", session, answers)
    told = (known, session.model.name, answers, body, session.model.tokenizer)
    if get(body, "stream", bool):
        return _events(session, answers, api.write_text_events(*told))
    return _json(api.write_text(*told), session, answers)


async def _messages(session: Session, body: dict[str, Any], retry: bool) -> Reply:
    from areal.agents import anthropic_messages as api

    answers = await session.chat(api.read_request(body), retry=retry)
    told = (_id("msg", session, answers), session.model.name, answers)
    if get(body, "stream", bool):
        return _named_events(session, answers, api.write_events(*told))
    return _json(api.write_message(*told), session, answers)


async def _responses(session: Session, body: dict[str, Any], retry: bool) -> Reply:
    from areal.agents import openai_responses as api

    before: list[Message] = []
    extends = api.previous_of(body, session.id)
    if extends is not None:
        before = await session.conversation(extends)
        if not before:
            known = body["previous_response_id"]
            raise NotFound(f"previous_response_id {known!r}: it was not stored, or has no answer")
    answers = await session.chat(api.read_request(body, extends, before), retry=retry)
    known = _id(api.KIND, session, answers)
    writer = api.Writer(known, session.model.name, body, session.model.tokenizer)
    if get(body, "stream", bool):
        return _named_events(session, answers, writer.events(answers[0]))
    return _json(writer.whole(answers[0]), session, answers)


async def _tokens(session: Session, body: dict[str, Any], retry: bool) -> Reply:
    from areal.agents import openai_text as api

    answers = await session.complete(**api.read_token_request(body), retry=retry)
    return _json(api.write_tokens(_id("gen", session, answers), answers), session, answers)


async def _reward(session: Session, body: dict[str, Any], retry: bool) -> Reply:
    value = number(body, "reward")
    if value is None:
        raise InvalidInput("reward: expected a number, got none")
    known = get(body, "completion_id", str)
    answer = number_of(known) if known is not None else None
    if known is not None and answer is None:
        raise InvalidInput(f"completion_id {known[:80]!r}: expected the id of an answer")
    await session.calls.reward(answer, value)
    return _json({})


_POSTS: dict[str, Callable[[Session, dict[str, Any], bool], Awaitable[Reply]]] = {
    "/chat/completions": _chat,
    "/completions": _completions,
    "/generate": _tokens,
    "/messages": _messages,
    "/responses": _responses,
    "/reward": _reward,
}


def _id(kind: str, session: Session, answers: Sequence[Answer]) -> str:
    """How the agent knows these answers; ends with the number of the first."""
    return f"{kind}-{session.id}-{answers[0].number}"


def _json(
    body: Mapping[str, Any], session: Session | None = None, answers: Sequence[Answer] = ()
) -> Reply:
    return Reply(200, orjson.dumps(body), sent=_delivery(session, answers))


def _events(
    session: Session, answers: Sequence[Answer], events: Iterable[Mapping[str, Any]]
) -> Reply:
    """Data-only events, the last one OpenAI's mark of the end."""
    lines = [b"data: %s\n\n" % orjson.dumps(event) for event in events]
    body = b"".join([*lines, b"data: [DONE]\n\n"])
    return Reply(200, body, stream=True, sent=_delivery(session, answers))


def _named_events(
    session: Session, answers: Sequence[Answer], events: Iterable[Mapping[str, Any]]
) -> Reply:
    """Events named by their type."""
    lines = [
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event))
        for event in events
    ]
    return Reply(200, b"".join(lines), stream=True, sent=_delivery(session, answers))


def _delivery(
    session: Session | None, answers: Sequence[Answer]
) -> Callable[[], Awaitable[None]] | None:
    if session is None:
        return None
    calls, numbers = session.calls, [answer.number for answer in answers]

    async def delivered() -> None:
        await calls.delivered(numbers)

    return delivered
