"""Around every request: a count of its answer."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_gateway.metrics import GatewayMetrics


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
