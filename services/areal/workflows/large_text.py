"""Work on text of any length, such as a log that a tool printed, beside the event loop.

The event loop renews leases and serves all other episodes. Templates and tokenizers take a second
for a few million characters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

LARGE = 1 << 16
"""Characters, or anything else that takes about as long, from which work is done in a thread."""
P = ParamSpec("P")
T = TypeVar("T")


async def apart(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what `work` returns; runs it in a thread if `size` is large."""
    if size < LARGE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def size_of(messages: Iterable[Any]) -> int:
    """Returns about how many characters messages have; of malformed ones, 0."""
    return sum(len(text) for message in messages for text in _texts(message))


def texts_shown(messages: Iterable[Any]) -> list[str]:
    """Returns the texts that every chat template shows in full: all but those of the assistant.

    Templates may leave out an earlier answer's reasoning.
    """
    return [
        text
        for each in messages
        if isinstance(each, Mapping) and each.get("role") != "assistant"
        for text in _contents(each)
    ]


def _texts(message: Any) -> Iterable[str]:
    if not isinstance(message, Mapping):
        return
    yield from _contents(message)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        yield from strings(arguments)


def _contents(message: Mapping[str, Any]) -> Iterable[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if isinstance(text, str):
                yield text


def strings(value: Any) -> Iterable[str]:
    """Yields all strings in a JSON value, keys of objects left out."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, (list, tuple)):
            waiting += each
