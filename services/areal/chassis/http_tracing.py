"""ASGI middleware: creates a span for each request that carries a trace."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal.chassis import tracing


class TracedRequests:
    """Continues the trace of `traceparent`; requests without one pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The span lasts until the last byte of the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with tracing.served(scope["method"], lambda: scope["headers"]) as span:
            if span is None:
                await self._app(scope, receive, send)
                return
            status = 500

            async def noted(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await self._app(scope, receive, noted)
            finally:
                # The pattern, not the path: names with ids in them would be of no use.
                route = getattr(scope.get("route"), "path", "")
                span.update_name(f"{scope['method']} {route}".rstrip())
                span.set_attribute("http.request.method", scope["method"])
                span.set_attribute("http.route", route)
                span.set_attribute("http.response.status_code", status)
