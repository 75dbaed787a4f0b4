"""An aiohttp application behind the token; whatever it refuses, it says in one format.

| a request                                            | status                    |
|------------------------------------------------------|---------------------------|
| of a foreign web page, where there is no token       | 403                       |
| without the token, or with a wrong one               | 401, with WWW-Authenticate|
| for a route that there is not                        | 404 or 405                |
| with a body that is too long                         | 413                       |
| whose handler raises an ArealError                   | that of the error         |
| whose handler raises another exception, which is a bug | 500; the log has it     |

Connections on which no request arrives are closed (`http_connections`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from areal.chassis.http_connections import IDLE_S, HttpSite
from areal.chassis.logging import get_logger
from areal.errors import ArealError, InvalidInput, NotFound, Unauthenticated, retry_headers
from areal.security import UNAUTHENTICATED, Security

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpApp:
    """Base of our aiohttp servers; a server overrides the methods that it needs.

    Example:
        class Pages(HttpApp):
            def routes(self):
                return [web.get("/healthz", self._healthz)]
    """

    open_paths: frozenset[str] = frozenset()
    """For probes, which cannot carry a secret."""

    def __init__(
        self,
        security: Security,
        *,
        max_body_bytes: int = 1 << 20,
        idle_s: float = IDLE_S,
        cancel_handlers: bool = False,
        grace_s: float = 2.0,
    ) -> None:
        """Listens nowhere yet.

        Args:
            security: The token that requests must carry.
            max_body_bytes: Limit of a body that a handler reads as a whole.
            idle_s: Longest pause between two requests of a connection, in seconds.
            cancel_handlers: Whether a handler is canceled when its client hangs up.
            grace_s: How long `close` waits for running handlers, in seconds.
        """
        self.security = security
        self._max_body_bytes, self._idle_s = max_body_bytes, idle_s
        self._cancel_handlers, self._grace_s = cancel_handlers, grace_s
        self._runner: web.AppRunner | None = None
        self._log = get_logger(type(self).__module__)

    def routes(self) -> Iterable[web.AbstractRouteDef]:
        """Returns the application's routes."""
        raise NotImplementedError

    def admits(self, request: web.Request) -> bool:
        """Returns whether a request may pass."""
        return request.path in self.open_paths or self.security.admits(
            request.headers.get("Authorization")
        )

    def said(self, error: Exception) -> tuple[ArealError, int]:
        """Returns how a handler's exception is said, and with which status."""
        if isinstance(error, ArealError):
            return error, error.http_status
        self._log.error("request_failed", exc_info=error)
        return ArealError(f"{type(error).__name__}: see the log of the service"), 500

    def refusal(self, request: web.Request, error: ArealError, status: int) -> web.Response:
        """Returns the response that says an error."""
        return web.json_response({"error": str(error)}, status=status)

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listens; returns the address, with the port that took the place of 0. Raises OSError."""
        logger = logging.getLogger("aiohttp.server")
        logger.addFilter(_is_our_fault)
        self._runner = web.AppRunner(
            self.application(),
            access_log=None,
            logger=logger,
            shutdown_timeout=self._grace_s,
            keepalive_timeout=self._idle_s,
            handler_cancellation=self._cancel_handlers,
        )
        await self._runner.setup()
        await HttpSite(self._runner, host, port).start()
        found: tuple[str, int] = self._runner.addresses[0][:2]
        return found

    async def close(self) -> None:
        """Stops listening and ends open requests."""
        if self._runner is not None:
            await self._runner.cleanup()

    def application(self) -> web.Application:
        """Returns what `start` serves."""
        app = web.Application(middlewares=[self._guard], client_max_size=self._max_body_bytes)
        app.add_routes(self.routes())
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := self.security.foreign(request.headers.get):
            return self._refused(request, InvalidInput(why), 403)
        if not self.admits(request):
            return self._refused(request, Unauthenticated(UNAUTHENTICATED), 401)
        try:
            return await handler(request)
        except Exception as error:
            gone = request.transport is None or request.transport.is_closing()
            if gone or request.writer.output_size:  # no one, or too late for another answer
                raise
            if isinstance(error, web.HTTPException):
                if error.status < 400 or error.content_type == "application/json":  # it is ours
                    raise
                response = self._refused(request, self._without_route(request, error), error.status)
                if "Allow" in error.headers:
                    response.headers["Allow"] = error.headers["Allow"]
                return response
            return self._refused(request, *self.said(error))

    def _without_route(self, request: web.Request, error: web.HTTPException) -> ArealError:
        if error.status == 413:
            return InvalidInput(f"body: expected at most {self._max_body_bytes} bytes")
        return NotFound(f"{request.method} {request.path[:200]}: {error.reason}")

    def _refused(self, request: web.Request, error: ArealError, status: int) -> web.Response:
        response = self.refusal(request, error, status)
        response.headers.update(retry_headers(error))
        if status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Bytes that are no HTTP are answered with 400; aiohttp would log a traceback of each."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
