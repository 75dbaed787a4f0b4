"""The HTTP routes that agents call, without an HTTP server: a request in, a reply out.

| route | is |
|---|---|
| `POST /v1/chat/completions`, `/v1/completions`, `/v1/responses` | OpenAI's |
| `GET /v1/models`, `/v1/models/ID` | OpenAI's |
| `POST /v1/messages`, `/v1/messages/count_tokens` | Anthropic's |
| `POST /inference/v1/generate` | tokens in, tokens out |
| `POST /v1/reward` | `{"reward": 1.0}` for the session; with `"completion_id"` for one answer; |
|  | `"parts": {"correct": 1}` says what it is made of |
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from areal.agents.allowed import ROUTES
from areal.agents.chat import Answer
from areal.agents.fields import number_of, score
from areal.agents.headers import Repeats, api_key
from areal.agents.replies import Reply, delivery, refused, streamed
from areal.agents.session import OnBug, Session, report_bug
from areal.errors import ArealError, InvalidInput, NotFound
from areal.request_fields import body_of, get
from areal.tokenizer.json_text import dumps
from areal.workflows.large_text import apart
from areal.workflows.rendering import Message

Answering = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Answers a route of its own."""


_LAST = "areal.agents.responses_stream"
"""The last module that `load_apis` imports."""


def load_apis() -> None:
    """Imports the SDKs' types; the first call takes a second."""
    for name in ("anthropic_messages", "openai_chat", "openai_text"):
        import_module(f"areal.agents.{name}")
    import_module(_LAST)


async def handle(
    find: Callable[[str], Awaitable[Session]],
    method: str,
    path: str,
    headers: Mapping[str, str],
    content: bytes,
    own: Mapping[tuple[str, str], Answering] | None = None,
    on_bug: OnBug = report_bug,
) -> Reply:
    """Answers a request; every error is translated to the error format of that API.

    Args:
        find: The session of an API key; raises Unauthenticated.
        method: The HTTP method, in upper case.
        path: Begins with /v1 once, twice (SDKs differ in what they append) or not at all.
        headers: Header names in any case.
        content: The body.
        own: Other routes, by method and path: body of a request to body of the answer.
        on_bug: Called with an unexpected exception before there is a session; see `Model.on_bug`.
    """
    names = {name.lower(): value for name, value in headers.items()}
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    session: Session | None = None
    try:
        session = await find(api_key(names))
        if answering := (own or {}).get((method, path)):
            return _json(await answering(body_of(content) if content.strip() else {}))
        return await _route(session, method, path, names, content)
    except Exception as error:
        if not isinstance(error, ArealError):
            session.bug(error) if session is not None else on_bug(error)
        return refused(error, path)


async def _route(
    session: Session, method: str, path: str, headers: Mapping[str, str], content: bytes
) -> Reply:
    if (method, path) == ("GET", "/models"):
        return _json({"object": "list", "data": [_model(session.model.name)]})
    if method == "GET" and path.startswith("/models/"):
        return _json(_model(unquote(path.removeprefix("/models/"))))  # any name will do
    route = _POSTS.get(path.removeprefix("/inference/v1")) if method == "POST" else None
    if route is None:
        raise NotFound(f"{method} {path}: no such route")
    if _LAST not in sys.modules:  # not on the event loop, which other episodes share
        await asyncio.to_thread(load_apis)
    body = body_of(content)
    ROUTES[path.removeprefix("/inference/v1")].check(body)
    return await route(session, body, Repeats.of(headers))


async def _chat(session: Session, body: dict[str, Any], repeats: Repeats) -> Reply:
    from areal.agents import openai_chat as api

    request = api.read_request(body)
    model, tokenizer = session.model.name, session.model.tokenizer
    if get(body, "stream", bool):
        return await streamed(
            lambda on_delta: session.chat(request, repeats=repeats, on_delta=on_delta),
            lambda first: api.Events(_id("chatcmpl", session, first), model, body, tokenizer),
            session,
            live=not body.get("logprobs"),
        )
    answers = await session.chat(request, repeats=repeats)
    known = _id("chatcmpl", session, answers[0].number)
    return _json(api.write_completion(known, model, answers, body, tokenizer), session, answers)


async def _completions(session: Session, body: dict[str, Any], repeats: Repeats) -> Reply:
    from areal.agents import openai_text as api

    model, tokenizer = session.model.name, session.model.tokenizer
    texts = [body["prompt"]] if isinstance(body.get("prompt"), str) else []
    await session.refuse_longer(texts)
    request = await apart(sum(map(len, texts)), api.read_text_request, body, tokenizer)
    if get(body, "stream", bool):
        return await streamed(
            lambda on_delta: session.complete(**request, repeats=repeats, on_delta=on_delta),
            lambda first: api.TextEvents(_id("cmpl", session, first), model, body, tokenizer),
            session,
            live=body.get("logprobs") is None,
        )
    answers = await session.complete(**request, repeats=repeats)
    known = _id("cmpl", session, answers[0].number)
    return _json(api.write_text(known, model, answers, body, tokenizer), session, answers)


async def _messages(session: Session, body: dict[str, Any], repeats: Repeats) -> Reply:
    from areal.agents import anthropic_messages as api

    request = api.read_request(body)
    if get(body, "stream", bool):
        return await streamed(
            lambda on_delta: session.chat(request, repeats=repeats, on_delta=on_delta),
            lambda first: api.Events(_id("msg", session, first), session.model.name),
            session,
            named=True,
            anthropic=True,
        )
    answers = await session.chat(request, repeats=repeats)
    known = _id("msg", session, answers[0].number)
    return _json(api.write_message(known, session.model.name, answers), session, answers)


async def _count_tokens(session: Session, body: dict[str, Any], repeats: Repeats) -> Reply:
    from areal.agents import anthropic_messages as api

    request = api.read_request(body)
    return _json({"input_tokens": await asyncio.to_thread(session.count_tokens, request)})


async def _responses(session: Session, body: dict[str, Any], repeats: Repeats) -> Reply:
    from areal.agents import openai_responses as api

    body = await api.resolved(body, session.id, session.answer_of)
    before: list[Message] = []
    extends = api.previous_of(body, session.id)
    if extends is not None:
        before = await session.conversation(extends)
        if not before:
            known = body["previous_response_id"]
            raise NotFound(f"previous_response_id {known!r}: it was not stored, or has no answer")
    request = api.read_request(body, extends, before)
    api.check_repeated(body, session.model.tokenizer)

    def writer(first: int) -> api.Writer:
        known = _id(api.KIND, session, first)
        return api.Writer(known, session.model.name, body, session.model.tokenizer)

    if get(body, "stream", bool):
        from areal.agents.responses_stream import Events

        return await streamed(
            lambda on_delta: session.chat(request, repeats=repeats, on_delta=on_delta),
            lambda first: Events(_id(api.KIND, session, first), writer(first).response),
            session,
            named=True,
            live=not api.wants_logprobs(body),
        )
    answers = await session.chat(request, repeats=repeats)
    return _json(writer(answers[0].number).whole(answers[0]), session, answers)


async def _tokens(session: Session, body: dict[str, Any], repeats: Repeats) -> Reply:
    from areal.agents import openai_text as api

    answers = await session.complete(**api.read_token_request(body), repeats=repeats)
    return _json(
        api.write_tokens(_id("gen", session, answers[0].number), answers), session, answers
    )


async def _reward(session: Session, body: dict[str, Any], repeats: Repeats) -> Reply:
    value = score(body)
    if value is None:
        raise InvalidInput("reward: expected a number, got none")
    known = get(body, "completion_id", str)
    answer = number_of(known, session.id) if known is not None else None
    if known is not None and answer is None:
        raise NotFound(f"completion_id {known[:80]!r}: no answer of this session has this id")
    await session.calls.reward(answer, value)
    return _json({})


_POSTS: dict[str, Callable[[Session, dict[str, Any], Repeats], Awaitable[Reply]]] = {
    "/chat/completions": _chat,
    "/completions": _completions,
    "/generate": _tokens,
    "/messages": _messages,
    "/messages/count_tokens": _count_tokens,
    "/responses": _responses,
    "/reward": _reward,
}


def _id(kind: str, session: Session, first: int) -> str:
    """Returns the agent's id of an answer; it ends with the number of the first answer."""
    return f"{kind}-{session.id}-{first}"


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "areal"}


def _json(
    body: Mapping[str, Any], session: Session | None = None, answers: Sequence[Answer] = ()
) -> Reply:
    delivered = None if session is None else delivery(session, answers)
    return Reply(200, dumps(body), delivered=delivered)
