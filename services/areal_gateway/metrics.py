"""What the gateway counts, and the middleware around every request that counts it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal.chassis.waits import Waits


class GatewayMetrics:
    """All metrics of the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "areal_gateway_requests",
            "Answered HTTP requests, by route and status code.",
            ["route", "code"],
            registry=registry,
        )
        self.streams = Gauge(
            "areal_gateway_event_streams", "Open event streams.", registry=registry
        )


# Open for as long as its page is: no wait.
_STREAM = "/v1/events"


class RequestCount:
    """ASGI middleware: counts answers by route and status code, records what is unanswered."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, waits: Waits) -> None:
        self._app = app
        self._metrics = metrics
        self._waits = waits

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

        if scope["path"] == _STREAM:
            await self._app(scope, receive, noted)
            return
        with self._waits.on("request", "rollout", f"{scope['method']} {scope['path']}"):
            await self._app(scope, receive, noted)
