"""A port on loopback through which the agents of one episode reach the model."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

from aiohttp import web

from areal.addresses import join_address, loopback
from areal.agents.replies import content_type, refused
from areal.agents.routes import handle
from areal.agents.session import Session
from areal.chassis.http_connections import IDLE_S, HttpSite
from areal.errors import InvalidInput, Unauthenticated

MAX_BODY_BYTES = 32 * 1024 * 1024
KEY_HEADER, NAME_HEADER = "X-Areal-Key", "X-Session-ID"
"""Headers that replace the API key where a client cannot set one, and that name one of its
sessions."""


class Endpoint:
    """Serves inside `async with`; finds a session by its API key.

    Example:
        >>> async with Endpoint() as endpoint:
        ...     api_key = endpoint.open(session)
        ...     await run(task, endpoint.base_url, api_key)
    """

    def __init__(self, host: str = "") -> None:
        """`host`: the address of this machine on which it listens; "": loopback."""
        self._sessions: dict[str, Callable[[str], Session]] = {}
        self._host = host or loopback()
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    def open(self, session: Session) -> str:
        """Admits an agent; returns its API key."""
        return self.open_each(lambda name: session)

    def open_each(self, find: Callable[[str], Session]) -> str:
        """Admits an agent with several sessions; returns its API key.

        Args:
            find: The session of a name, which requests carry in the header X-Session-ID.
        """
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = find
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
        await HttpSite(self._runner, self._host, 0).start()
        self.base_url = f"http://{join_address(*self._runner.addresses[0][:2])}/v1"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        async def find(key: str) -> Session:
            opened = self._sessions.get(request.headers.get(KEY_HEADER, key))
            if opened is None:
                raise Unauthenticated("API key: expected the key of an open session")
            return opened(request.headers.get(NAME_HEADER, ""))

        try:
            content = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            too_large = InvalidInput(f"body: expected at most {MAX_BODY_BYTES} bytes")
            reply = refused(too_large, request.path, error.status)
        else:
            reply = await handle(find, request.method, request.path, request.headers, content)
        kind = content_type(reply.stream)
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
