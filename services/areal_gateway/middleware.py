"""Around every request: a limit on its body, a count of its answer."""

from __future__ import annotations

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_gateway.metrics import GatewayMetrics


class BodyLimit:
    """ASGI middleware: 413 with one clear line once a body passes the limit."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """Wraps `app`."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts the body while it arrives."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                await self._refuse(send, int(value))
                return
        received = 0
        too_large = False
        started = False

        async def counted() -> Message:
            nonlocal received, too_large
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                too_large = True
                # The rest is not read: the application sees a client that went away.
                return {"type": "http.disconnect"}
            return message

        async def guarded(message: Message) -> None:
            nonlocal started
            if too_large and not started:
                return
            started = True
            await send(message)

        try:
            await self._app(scope, counted, guarded)
        except Exception:
            if not too_large or started:
                raise
        if too_large and not started:
            await self._refuse(send, received)

    async def _refuse(self, send: Send, size: int) -> None:
        text = f"body of {size} bytes or more: expected at most {self._max_bytes}"
        body = orjson.dumps({"error": text})
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class RequestCount:
    """ASGI middleware: counts answers by route and status code."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        """Wraps `app`."""
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Notes the status when the answer begins."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The pattern, not the path: ids in labels would grow without bound.
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(route, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, noted)
