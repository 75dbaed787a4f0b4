"""Replies to agents: complete ones, and streams that start with the first sampled text.

    the session ── AnswerDelta ──> queue ──> events ──> parts of the body ──> HTTP

All HTTP servers of agents send a `Reply` with `send`, and add only their framework's own calls.

| the request ends             | then                                                            |
|------------------------------|-----------------------------------------------------------------|
| with an error, before text   | the reply has the status of the error                           |
| with an error, after text    | the error is the last event of the stream                       |
| because the agent hangs up   | `send` ends, and stops the generation                           |
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from areal.agents.allowed import ROUTES
from areal.agents.chat import Answer
from areal.agents.partial import AnswerDelta, OnDelta
from areal.agents.session import Session
from areal.errors import ArealError, InvalidInput, NotFound, PromptTooLong, retry_headers
from areal.tokenizer.json_text import dumps

_MAX_MESSAGE = 2000
_FIELD = re.compile(r"(?P<field>(?P<root>[A-Za-z_]\w*)(?:\.\w+|\[\d+\])*)(?=:| [^\n]*:)")
Event = dict[str, Any]


class Events(Protocol):
    """Writes answers as the events of one API."""

    def begin(self, delta: AnswerDelta | None = None) -> Iterator[Event]:
        """The first events; without a delta the answers are complete."""
        ...

    def more(self, delta: AnswerDelta) -> Iterator[Event]:
        """Returns the events for new text of the unfinished answer."""
        ...

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """Returns the events for everything that `more` has not written."""
        ...


class Parts:
    """The parts of a streamed body; if there is an error, the last one says it. Must be closed."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes],
        failed: Callable[[Exception], bytes],
        stop: Callable[[], Awaitable[None]],
    ) -> None:
        """Takes what makes the parts.

        Args:
            parts: The parts, or an exception.
            failed: Returns the part that says this exception to the agent.
            stop: Stops what makes the parts.
        """
        self._parts, self._failed, self._stop = parts, failed, stop
        self._read = self._until_failed()
        self.whole = False
        """Whether all parts were taken, and none of them says an error."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._read

    async def _until_failed(self) -> AsyncGenerator[bytes]:
        try:
            async for part in self._parts:
                yield part
            self.whole = True
        except Exception as error:
            yield self._failed(error)

    async def aclose(self) -> None:
        """May be called at any time; when it returns, the generation has stopped."""
        await self._read.aclose()
        await self._parts.aclose()
        await self._stop()


@dataclass(frozen=True)
class Reply:
    """A response to an HTTP request."""

    status: int
    body: bytes
    stream: bool = False
    """Whether the body is server-sent events."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Besides those of `http_headers`."""
    delivered: Callable[[], Awaitable[None]] | None = None
    """Records that the agent has the answers; see `arrived`."""
    parts: Parts | None = None
    """The rest of a streamed body, after `body`; must be closed."""
    receipt: bytes = b""
    """What the process that sends the body to the client has to store once it has."""

    def http_headers(self) -> dict[str, str]:
        """Returns all headers but those about the body's length."""
        if not self.stream:
            return {"Content-Type": "application/json", **self.headers}
        # Events are UTF-8; some clients take text without a charset for Latin-1. A proxy that
        # buffers would hold back all events until the last.
        return {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            **self.headers,
        }

    async def arrived(self) -> None:
        """Records the answers as delivered, unless the stream ended with an error.

        Call it once all of the reply has been sent to a client that did not hang up.
        """
        if self.delivered is not None and (self.parts is None or self.parts.whole):
            await self.delivered()


async def send(
    reply: Reply,
    begin: Callable[[], Awaitable[object]],
    write: Callable[[bytes], Awaitable[object]],
    end: Callable[[], Awaitable[object]],
) -> None:
    """Sends a reply with a server's own calls; however it ends, the generation has stopped.

    Args:
        reply: What to send.
        begin: Sends the status and `http_headers`.
        write: Sends a part of the body. When the client hangs up, it raises, or its task is
            canceled.
        end: Sends the end of the body.
    """
    try:
        await begin()
        if reply.body:
            await write(reply.body)
        if reply.parts is not None:
            async for part in reply.parts:
                await write(part)
    finally:
        if reply.parts is not None:
            await reply.parts.aclose()
    # Last, since a server may take a client that has the whole answer for one that hung up.
    await end()


def failure(error: Exception, *, typed: bool, anthropic: bool) -> tuple[int, Event]:
    """Status and body of an error.

    Args:
        error: Any. One that is none of ours is a bug: its class is all that the agent is told.
        typed: Whether the body has a type, as Anthropic's and the events of OpenAI's responses.
        anthropic: Whether the words are Anthropic's, not OpenAI's.
    """
    codes = type(error) if isinstance(error, ArealError) else ArealError
    status, kind = codes.http_status, codes.kind
    if anthropic and kind == ArealError.kind:
        kind = "api_error"
    message, param, code = f"{type(error).__name__}: see the log of the service", None, None
    if isinstance(error, PromptTooLong):
        # Frameworks shorten the history when they see these very words, or this code; LangChain
        # looks for the code in the text of the SDK's error, which may contain only the message.
        message = (
            f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
            if anthropic
            else f"This model's maximum context length is {error.limit} tokens. However, your "
            f"messages resulted in {error.tokens} tokens, which leaves no room for an answer. "
            "Please reduce the length of the messages (context_length_exceeded)."
        )
        param, code = "messages", "context_length_exceeded"
    elif isinstance(error, ArealError):
        # Templates and servers write what they like into theirs.
        message = str(error)[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
        param = _field_of(message) if isinstance(error, (InvalidInput, NotFound)) else None
    error_body: Event = {"message": message, "type": kind}
    if not anthropic:
        error_body |= {"param": param, "code": code}
    return status, {"type": "error", "error": error_body} if typed else {"error": error_body}


def _field_of(message: str) -> str | None:
    """The field of a request that an error begins with, such as `tools[0].function.name`."""
    found = _FIELD.match(message)
    if found is None:
        return None
    known = any(
        found["root"] in fields.honored | fields.ignored | fields.only.keys()
        for fields in ROUTES.values()
    )
    return found["field"] if known or "not supported; leave it out" in message else None


def refused(error: Exception, path: str, status: int | None = None) -> Reply:
    """The reply that says an error in the format of the path's API.

    Args:
        error: What went wrong.
        path: The request's; may begin with anything.
        status: Its status, where that is known; else the one of the error's class.
    """
    anthropic = is_anthropic(path)
    code, body = failure(error, typed=anthropic, anthropic=anthropic)
    if status == 413:
        body["error"]["type"] = "request_too_large"
    return Reply(status or code, dumps(body), headers=retry_headers(error))


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return "/messages/" in f"{path}/"


def delivery(session: Session, answers: Sequence[Answer]) -> Callable[[], Awaitable[None]]:
    """Returns a function that records the answers as delivered."""
    calls, numbers = session.calls, [answer.number for answer in answers]

    async def delivered() -> None:
        await calls.delivered(numbers)

    return delivered


async def streamed(
    run: Callable[[OnDelta | None], Coroutine[Any, Any, list[Answer]]],
    write: Callable[[int], Events],
    session: Session,
    *,
    named: bool = False,
    anthropic: bool = False,
    live: bool = True,
) -> Reply:
    """Returns a reply as soon as its first text, or the whole answer, is known.

    Args:
        run: Samples the answers; calls its argument with new text.
        write: Returns the writer of the events, given the number of the first answer.
        session: The session of the answers.
        named: Whether events have names; without names, `[DONE]` ends the stream.
        anthropic: Whether the API is Anthropic's.
        live: Whether to send text before the answers are complete.
    """
    news: asyncio.Queue[AnswerDelta | None] = asyncio.Queue()
    task = asyncio.create_task(run(news.put_nowait if live else None))
    task.add_done_callback(lambda _: news.put_nowait(None))

    def framed(events: Iterable[Event]) -> bytes:
        return b"".join(frame(event, named) for event in events)

    def ending(events: Events, answers: list[Answer]) -> bytes:
        return framed(events.end(answers)) + (b"" if named else b"data: [DONE]\n\n")

    async def parts(first: AnswerDelta) -> AsyncGenerator[bytes]:
        events = write(first.first)
        yield framed(events.begin(first)) + framed(events.more(first))
        while (delta := await news.get()) is not None:
            yield framed(events.more(delta))
        yield ending(events, await task)

    def failed(error: Exception) -> bytes:
        if not isinstance(error, ArealError):
            session.bug(error)
        return frame(failure(error, typed=named, anthropic=anthropic)[1], named)

    async def delivered() -> None:
        await delivery(session, await task)()

    try:
        first = await news.get()
        if first is not None:
            rest = Parts(parts(first), failed, partial(_stop, task))
            return Reply(200, b"", stream=True, parts=rest, delivered=delivered)
        answers = await task
    except BaseException:
        await _stop(task)
        raise
    events = write(answers[0].number)
    body = framed(events.begin()) + ending(events, answers)
    return Reply(200, body, stream=True, delivered=delivered)


def frame(event: Event, named: bool) -> bytes:
    """Returns an event of a stream as it is sent; `named`: with the name that is its type."""
    name = b"event: %s\n" % event["type"].encode() if named else b""
    return b"%sdata: %s\n\n" % (name, dumps(event))


async def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
