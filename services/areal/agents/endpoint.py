"""A port on loopback through which the agents of one episode reach the model."""

from __future__ import annotations

import secrets
from contextlib import aclosing
from types import TracebackType
from typing import Self

from aiohttp import web

from areal.agents.routes import handle
from areal.agents.session import Session
from areal.chassis.http_connections import IDLE_S, HttpSite
from areal.errors import Unauthenticated

MAX_BODY_BYTES = 32 * 1024 * 1024


class Endpoint:
    """Serves inside `async with`; finds a session by its API key.

    Example:
        >>> async with Endpoint() as endpoint:
        ...     api_key = endpoint.open(session)
        ...     await run(task, endpoint.base_url, api_key)
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    def open(self, session: Session) -> str:
        """Admits an agent; returns its API key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=0.0,
            keepalive_timeout=IDLE_S,
            # An agent that hangs up wants no answer; the model is to stop.
            handler_cancellation=True,
        )
        await self._runner.setup()
        await HttpSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = "http://{}:{}/v1".format(*self._runner.addresses[0])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _find(self, key: str) -> Session:
        session = self._sessions.get(key)
        if session is None:
            raise Unauthenticated("API key: it belongs to no session")
        return session

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        reply = await handle(self._find, request.method, request.path, request.headers, content)
        kind = "text/event-stream" if reply.stream else "application/json"
        if reply.parts is not None:
            stream = web.StreamResponse(status=reply.status, headers=reply.headers)
            stream.content_type = kind
            async with aclosing(reply.parts) as parts:
                await stream.prepare(request)
                async for part in parts:
                    await stream.write(part)
            await stream.write_eof()
            return stream
        response = web.Response(
            status=reply.status, body=reply.body, content_type=kind, headers=reply.headers
        )
        if reply.sent is not None:
            await response.prepare(request)
            await response.write_eof()
            await reply.sent()
        return response
