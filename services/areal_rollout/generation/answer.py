"""Reading the body of a /generate answer: whole, or as a stream of which the newest event counts.

    data: {"output_ids": [5, 7], …}      each event repeats all before it: only the newest is kept,
    data: {"output_ids": [5, 7, 2], …}   none but the last is parsed
    data: [DONE]

SGLang says which version sampled which token (`weight_versions`) in the last event only; before it
there is `weight_version`, the newest that any token of the event can have. So while it is the
version that the server had confirmed when the request began, all tokens are of that version; from
the first event that names another one on it is unknown which are. When a stream breaks, what is
kept is the newest event of the known ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import aiohttp

from areal_rollout.generation.protocol import ServerError, tokens_of
from areal_rollout.generation.reading import read_apart

MAX_ANSWER_BYTES = 64 * 1024 * 1024
STREAM_FROM = 256
"""Requests for fewer tokens are not streamed: little is lost if their server fails."""
EVENTS = 32
"""Events of a request that uses all its tokens. The stream has the bytes of one answer times half
of this number."""

_INDEX = re.compile(rb'"index":\s*(\d+)')
_VERSION = re.compile(rb'"weight_version":\s*"([^"]*)"')


LIVE_TOKENS = 8, 128
"""Least and most tokens between two events of an answer that is streamed to a client."""


def stream_interval(tokens: int, live: bool = False) -> int:
    """Returns the tokens from one event to the next; 0: do not stream."""
    if live:
        return min(max(LIVE_TOKENS[0], tokens // EVENTS), LIVE_TOKENS[1])
    return 0 if tokens < STREAM_FROM else max(STREAM_FROM // 8, tokens // EVENTS)


class Answer:
    """The body of one answer, and what can be kept if it breaks off.

    Args:
        version: The version that the server had confirmed when the request was sent.
        count: Sequences that were asked for; the events of several say which one by an index.
        on_tokens: Called with the index of a sequence and its tokens so far. These tokens are
            kept even if the server fails.
        routes_bytes: How much longer than MAX_ANSWER_BYTES the body may be, for its routes.
        of_adapter: The request named an adapter, which is that version: every token is of it,
            whatever the server says of itself.
    """

    __slots__ = ("_count", "_most", "_on_tokens", "of_adapter", "partial", "version")

    def __init__(
        self,
        version: int,
        count: int = 1,
        on_tokens: Callable[[int, Sequence[int]], None] | None = None,
        routes_bytes: int = 0,
        *,
        of_adapter: bool = False,
    ) -> None:
        self.of_adapter = of_adapter
        self._on_tokens = on_tokens
        self._most = MAX_ANSWER_BYTES + routes_bytes
        self.version = version
        self._count = count
        self.partial: dict[int, bytes] = {}
        """For each sequence, the newest event whose tokens have known versions."""

    async def read(self, http: aiohttp.ClientResponse) -> bytes:
        """The whole answer as JSON: an object for one sequence, else an array.

        Raises:
            ServerError: Too long, or the stream ended without saying so.
        """
        if http.content_type == "text/event-stream":
            return await self._last_events(http)
        length = http.content_length
        if length is not None and length <= self._most:
            return await http.read()
        whole = bytearray()
        async for part in http.content.iter_any():
            whole += part
            self._check_size(whole)
        return bytes(whole)

    async def _last_events(self, http: aiohttp.ClientResponse) -> bytes:
        buffer, seen = bytearray(), 0
        newest: dict[int, bytes] = {}
        unknown: set[int] = set()
        version = str(self.version).encode()
        async for part in http.content.iter_any():
            buffer += part
            while (end := buffer.find(b"\n\n", max(0, seen - 1))) >= 0:
                event = bytes(buffer[:end]).strip().removeprefix(b"data:").strip()
                del buffer[: end + 2]
                seen = 0
                if event == b"[DONE]":
                    self.partial.clear()
                    return self._joined(newest)
                index = self._index(event)
                newest[index] = event
                found = _VERSION.search(event)
                if not self.of_adapter and (found is None or found[1] != version):
                    unknown.add(index)
                # The last event of a sequence says the version of each of its tokens.
                if index not in unknown or b'"weight_versions"' in event:
                    self.partial[index] = event
                    if self._on_tokens is not None and index >= 0:
                        self._on_tokens(index, await read_apart(len(event), tokens_of, event))
            seen = len(buffer)
            self._check_size(buffer)
        raise ServerError("the stream ended before [DONE]")

    def _index(self, event: bytes) -> int:
        """The event's sequence; -1: it is of none, which an error is."""
        if self._count == 1:
            return 0
        found = _INDEX.match(event, event.rfind(b'"index"'))
        return -1 if found is None else int(found[1])

    def _joined(self, newest: dict[int, bytes]) -> bytes:
        if self._count == 1:
            return newest.get(0, b"")
        if -1 in newest:
            return newest[-1]
        missing = [index for index in range(self._count) if index not in newest]
        if missing:
            raise ServerError(f"the stream ended without sequence {missing[0]}")
        return b"[" + b",".join(newest[index] for index in range(self._count)) + b"]"

    def _check_size(self, body: bytearray) -> None:
        if len(body) > self._most:
            raise ServerError(f"answer longer than {self._most} bytes")
