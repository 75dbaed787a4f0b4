"""The HTTP connections of a generation client: never more than the process may have open.

A process without file descriptors cannot connect, and blames servers that are well. So requests
wait here, where no one is to blame, and aborts have room of their own.

Nor does a burst of thousands connect at once: the event loop would be so late that connections time
out which the servers had accepted.

| who     | consumes      | waits for               | unblocked by                    |
|---------|---------------|-------------------------|---------------------------------|
| take    | a connection  | a free one, in order    | free, or the request's deadline |
| abort   | one of a few  | a free one, in order    | an abort's end: 5 s at most     |
| connect | one of a few  | a free one, in order    | a handshake's end: 5 s each     |
| calm    | nothing       | no one waits to connect | the last that waits; a timeout  |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp.connector import Connection

from areal.clients.http_token import or_else
from areal.errors import WaitTimeout

_ABORTS = 64
_CONNECTING = 64
_CONNECT_S = 5.0
# A timeout noticed so late says that this process had no time, not that a server is away.
_LATE_S = 0.5
_OWN_DELAYS = 3
RESERVED_FILES = 512
"""Descriptors for everything but requests: aborts, idle connections, gRPC, logs."""


class _Connector(aiohttp.TCPConnector):
    """Opens a few connections at a time. aiohttp's connect timeout begins with the turn."""

    def __init__(self) -> None:
        # Below the 5 s after which uvicorn closes idle connections: never reuse a dead one.
        super().__init__(limit=0, keepalive_timeout=3.0)
        self._turns = asyncio.Semaphore(_CONNECTING)
        self._waiting = 0
        self.calm = asyncio.Event()
        self.calm.set()

    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        self._waiting += 1
        if self._waiting > _CONNECTING:
            self.calm.clear()
        try:
            async with self._turns:
                now = asyncio.get_running_loop().time
                for _ in range(_OWN_DELAYS):
                    deadline = now() + _CONNECT_S
                    try:
                        return await super().connect(*args, **kwargs)
                    except TimeoutError:
                        if now() - deadline < _LATE_S:
                            raise
                return await super().connect(*args, **kwargs)
        finally:
            self._waiting -= 1
            if self._waiting <= _CONNECTING:
                self.calm.set()


class Connections:
    """One session, so many requests in it at once."""

    def __init__(
        self, headers: Mapping[str, str], most: int, previous: Mapping[str, str] | None = None
    ) -> None:
        self._headers = dict(headers)
        self._middlewares = or_else(previous or {})
        self._most = most
        self._free = asyncio.Semaphore(most)
        self._aborts = asyncio.Semaphore(_ABORTS)
        self._session: aiohttp.ClientSession | None = None
        self._connector: _Connector | None = None

    async def open(self) -> None:
        """Opens the connection pool."""
        self._connector = _Connector()
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers=self._headers,
            middlewares=self._middlewares,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def close(self) -> None:
        """Closes the connection pool."""
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connection pool; call `open` first."""
        assert self._session is not None, "call open() first"
        return self._session

    async def calm(self, timeout: float) -> None:
        """Returns when no request waits to connect, at the latest after `timeout` seconds."""
        if self._connector is None or self._connector.calm.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._connector.calm.wait()

    async def take(self, deadline: float) -> None:
        """Waits for a free connection; `free` gives it back.

        Raises:
            WaitTimeout: None became free before the deadline (loop time).
        """
        if not self._free.locked():
            await self._free.acquire()  # at once
            return
        since = time.monotonic()
        try:
            async with asyncio.timeout_at(deadline):
                await self._free.acquire()
        except TimeoutError:
            raise WaitTimeout(
                "a free connection",
                on=f"this worker's {self._most} running requests",
                since=since,
                hint="more rollout replicas, or a higher limit on open files (ulimit -n)",
            ) from None

    def free(self) -> None:
        """Gives a connection back."""
        self._free.release()

    async def abort(self, url: object, rid: str) -> None:
        """Tells a server that no one waits for a request any more; it may not hear it."""
        async with self._aborts:
            if self._session is None or self._session.closed:
                return
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(5.0):
                    async with self._session.post(str(url), json={"rid": rid}) as http:
                        await http.read()
