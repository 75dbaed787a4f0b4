"""The bearer token in front of an ASGI application."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from areal.security import UNAUTHENTICATED, Security

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(scope: Scope, name: bytes) -> bytes | None:
    """Returns the first header with that (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


def _reader(scope: Scope) -> Callable[[str], str | None]:
    def read(name: str) -> str | None:
        value = header(scope, name.encode())
        return None if value is None else value.decode("latin-1")

    return read


class BearerAuth:
    """Middleware: a request without the token gets 401, and one of a foreign web page 403.

    Example:
        app.add_middleware(BearerAuth, security=security, open_paths=frozenset({"/healthz"}))
    """

    def __init__(self, app: App, *, security: Security, open_paths: frozenset[str]) -> None:
        """Wraps `app`; `open_paths` are for probes, which cannot carry a secret."""
        self.app = app
        self.security = security
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif why := self.security.foreign(_reader(scope)):
            await answer(scope, send, json.dumps({"error": why}).encode(), "application/json", 403)
        elif self.admits(scope):
            await self.app(scope, receive, send)
        else:
            await self.refuse(scope, send)

    def admits(self, scope: Scope) -> bool:
        """Returns whether a request may pass."""
        if scope["path"] in self._open_paths:
            return True
        return self.security.admits(header(scope, b"authorization"))

    async def refuse(self, scope: Scope, send: Send) -> None:
        """Answers a request without the token with 401."""
        body = json.dumps({"error": UNAUTHENTICATED}).encode()
        await answer(scope, send, body, "application/json")


async def answer(
    scope: Scope,
    send: Send,
    body: bytes,
    media_type: str,
    status: int = 401,
    more: Mapping[str, str] | None = None,
) -> None:
    """Sends a refusal with a body, and with `more` headers."""
    if scope["type"] != "http":  # a websocket: there is none here
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = {
        b"content-type": media_type.encode(),
        b"content-length": str(len(body)).encode(),
        b"cache-control": b"no-store",
    }
    headers |= {name.lower().encode(): value.encode() for name, value in (more or {}).items()}
    if status == 401:
        headers[b"www-authenticate"] = b"Bearer"
    await send({"type": "http.response.start", "status": status, "headers": list(headers.items())})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
