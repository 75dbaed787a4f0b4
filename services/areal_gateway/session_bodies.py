"""Bodies of agents' requests: read only for who has the session's key, and few bytes at once.

    head of a request ── key wrong ──> passed on without a body: the worker refuses it
         │ key right
         v
    room for its bytes ── none within ROOM_WITHIN_S ──> 429
         │ held until the call is answered
         v
    the body ── not whole within BODY_WITHIN_S ──> 408, hung up

These routes are open to everyone, as agents do not have the gateway's token. So nothing that a
stranger sends may take memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from fastapi import HTTPException, Request

from areal.agents.headers import api_key
from areal.clients.buffer.sessions import BufferSessions, place_of
from areal.errors import CapacityExceeded, NotFound
from areal_gateway.config import GatewayConfig

BODY_WITHIN_S = 60.0
ROOM_WITHIN_S = 10.0
_KNOWN = 10_000
# A session that ended and was opened again has another key. For a wrong key the ledger is asked
# again, but not more often.
_FRESH_S = 1.0


class SessionKeys:
    """Which key opens which session, as the ledger said last."""

    def __init__(self, sessions: BufferSessions) -> None:
        self._sessions = sessions
        self._known: OrderedDict[str, tuple[str, float]] = OrderedDict()

    async def admits(self, session_id: str, key: str) -> bool:
        """Whether it is the session's key; raises Unavailable while the ledger is away."""
        digest = hashlib.sha256(key.encode(errors="replace")).hexdigest()
        known, since = self._known.get(session_id, ("", 0.0))
        if known and hmac.compare_digest(digest, known):
            self._known.move_to_end(session_id)
            return True
        if known and time.monotonic() - since < _FRESH_S:
            return False
        try:
            found = await self._sessions.get(*place_of(session_id))
        except NotFound:
            self._known.pop(session_id, None)
            return False
        self._known[session_id] = found.key_digest, time.monotonic()
        self._known.move_to_end(session_id)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return hmac.compare_digest(digest, found.key_digest)


class _Room:
    """Bytes that may be held at once."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def of(self, count: int) -> AsyncGenerator[None]:
        """Holds `count` bytes; raises CapacityExceeded when there is no room for long."""
        count = min(count, self._size)
        try:
            async with asyncio.timeout(ROOM_WITHIN_S):
                while self._free < count:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise CapacityExceeded(
                f"requests of agents: {self._size - self._free} bytes are being answered, at most "
                f"{self._size}; try again in 5 s"
            ) from None
        self._free -= count
        try:
            yield
        finally:
            self._free += count
            self._freed.set()


class SessionBodies:
    """Reads bodies as this page says."""

    def __init__(self, sessions: BufferSessions | None, config: GatewayConfig) -> None:
        """`sessions`: None: there is no ledger that knows keys, so all bodies are read."""
        self._keys = SessionKeys(sessions) if sessions is not None else None
        self._most = config.max_body_bytes
        self._room = _Room(config.max_bodies_bytes)

    @asynccontextmanager
    async def of(self, session_id: str, request: Request) -> AsyncGenerator[bytes | None]:
        """The body of a request, and room for it until it is answered; None: a wrong key.

        Raises:
            CapacityExceeded: Too many bytes of others are being answered.
            HTTPException: The body did not come, or is too large.
        """
        if request.method == "GET":
            yield b""
            return
        key = api_key(request.headers)
        if self._keys is not None and not await self._keys.admits(session_id, key):
            yield None
            return
        async with self._room.of(self._length(request.headers)):
            yield await _read(request)

    def _length(self, headers: Mapping[str, str]) -> int:
        """How much a body may turn out to be."""
        told = headers.get("content-length", "")
        known = told.isdecimal() and len(told) < 16
        return min(int(told), self._most) if known else self._most


async def _read(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            return await request.body()
    except TimeoutError:
        raise HTTPException(
            408, f"the body was not whole within {BODY_WITHIN_S:.0f} s", {"Connection": "close"}
        ) from None
