"""A port on loopback through which the agents of one episode reach the model."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from areal.addresses import join_address, loopback
from areal.agents.replies import refused, send
from areal.agents.routes import handle
from areal.agents.session import Session
from areal.chassis.http_app import HttpApp
from areal.errors import ArealError, Unauthenticated
from areal.security import Security

MAX_BODY_BYTES = 32 * 1024 * 1024
KEY_HEADER, NAME_HEADER = "X-Areal-Key", "X-Session-ID"
"""Headers that replace the API key where a client cannot set one, and that name one of its
sessions."""


class Endpoint(HttpApp):
    """Serves inside `async with`; finds a session by its API key.

    Example:
        >>> async with Endpoint() as endpoint:
        ...     api_key = endpoint.open(session)
        ...     await run(task, endpoint.base_url, api_key)
    """

    def __init__(self, host: str = "") -> None:
        """`host`: the address of this machine on which it listens; "": loopback."""
        super().__init__(
            Security(allow_insecure_bind=True),  # each session has its own key
            max_body_bytes=MAX_BODY_BYTES,
            # An agent that hangs up wants no answer; the model is to stop.
            cancel_handlers=True,
            grace_s=0.0,
        )
        self._sessions: dict[str, Callable[[str], Session]] = {}
        self._host = host or loopback()
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
        self.base_url = f"http://{join_address(*await self.start(self._host, 0))}/v1"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/{path:.*}", self._serve)]

    def refusal(self, request: web.Request, error: ArealError, status: int) -> web.Response:
        """In the format of the API that the path belongs to."""
        reply = refused(error, request.path, status)
        return web.Response(status=status, body=reply.body, headers=reply.http_headers())

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        async def find(key: str) -> Session:
            opened = self._sessions.get(request.headers.get(KEY_HEADER, key))
            if opened is None:
                raise Unauthenticated("API key: expected the key of an open session")
            return opened(request.headers.get(NAME_HEADER, ""))

        content = await request.read()
        reply = await handle(find, request.method, request.path, request.headers, content)
        response = web.StreamResponse(status=reply.status, headers=reply.http_headers())
        if reply.parts is None:
            response.content_length = len(reply.body)

        async def write(part: bytes) -> None:
            if request.method != "HEAD":
                await response.write(part)

        await send(reply, lambda: response.prepare(request), write, response.write_eof)
        await reply.arrived()
        return response
