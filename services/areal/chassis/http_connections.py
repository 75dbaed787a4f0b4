"""Closes HTTP connections on which no complete request has arrived.

    accepted ──> waiting ── the head of a request is whole ──> not our business
                    │ HEAD_WITHIN_S passes, or too many others wait
                    v
                 hung up

Every connection takes a file descriptor, of which a process has a limited number. Without this
limit, a few hundred silent connections would keep all others out, health probes too, before any
token is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import cast

from aiohttp import web

from areal.addresses import join_address
from areal.chassis.process import open_files

HEAD_WITHIN_S = 10.0
# A process that stood still finds requests in a heap, and timers that are over: it reads first.
_READ_FIRST_S = 0.5
# Waiting connections may take 1/4 of the descriptors: calls, files and peers need the others.
_SHARE = 4
# An idle connection of aiohttp, between two requests; clients of ours give it up before (15 s).
IDLE_S = 30.0


class Waiting:
    """The connections of one server without a request yet, the oldest first."""

    def __init__(self, within_s: float = HEAD_WITHIN_S, at_most: int | None = None) -> None:
        """`at_most`: how many may wait at once; None: a quarter of the process's descriptors."""
        self._within_s = within_s
        self._at_most = max(1, open_files() // _SHARE) if at_most is None else at_most
        self._waiting: dict[Hashable, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}

    def begin(self, connection: Hashable, hang_up: Callable[[], None]) -> None:
        """Adds a connection; one that is waiting already keeps its deadline."""
        if connection in self._waiting:
            return
        if len(self._waiting) >= self._at_most:
            self._hang_up(next(iter(self._waiting)))
        timer = asyncio.get_running_loop().call_later(self._within_s, self._late, connection)
        self._waiting[connection] = timer, hang_up

    def end(self, connection: Hashable) -> None:
        """Removes a connection that has sent its request or closed."""
        if found := self._waiting.pop(connection, None):
            found[0].cancel()

    def _late(self, connection: Hashable) -> None:
        _, hang_up = self._waiting[connection]
        loop = asyncio.get_running_loop()
        self._waiting[connection] = (
            loop.call_later(_READ_FIRST_S, self._hang_up, connection),
            hang_up,
        )

    def _hang_up(self, connection: Hashable) -> None:
        timer, hang_up = self._waiting.pop(connection)
        timer.cancel()
        hang_up()


class HttpSite(web.BaseSite):
    """Listens for an aiohttp application, with the same deadline for silent connections."""

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        super().__init__(runner)
        self._host, self._port = host, port

    @property
    def name(self) -> str:
        return f"http://{join_address(self._host, self._port)}"

    async def start(self) -> None:
        await super().start()
        waiting, handlers = Waiting(), self._runner.server
        assert handlers is not None, "the runner is set up"
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _FirstHead(handlers(), waiting), self._host, self._port, backlog=self._backlog
        )


class _FirstHead(asyncio.Protocol):
    """Runs before a handler of aiohttp's, which has its own deadline after the first request."""

    def __init__(self, handler: web.RequestHandler, waiting: Waiting) -> None:
        self._handler = handler
        self._waiting = waiting
        self._end = b""
        self._whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._waiting.begin(self, cast("asyncio.Transport", transport).abort)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)
        if not self._whole:
            seen = self._end + data
            self._whole, self._end = b"\r\n\r\n" in seen, seen[-3:]
            if self._whole:
                self._waiting.end(self)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._waiting.end(self)
        self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()
