"""Configures uvicorn for our services."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from areal.chassis.http_auth import App
from areal.chassis.http_connections import Waiting
from areal.errors import ConfigError


def bind(host: str, port: int, key: str) -> socket.socket:
    """Opens the listening socket before the server takes requests; an error names `key`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        cause = error.strerror or error
        raise ConfigError(f"{key} {host}:{port}: cannot listen there: {cause}") from None
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn that closes silent connections and leaves signals to the process."""

    def __init__(self, app: App, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                loop="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                **options,
            )
        )
        self.server_state = _State()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals: the service drains first."""
        yield


class _State(ServerState):
    """The state that the connections of one server share."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting()


class _Protocol(HttpToolsProtocol):
    """One connection of uvicorn's."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._state.begin(self, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # uvicorn's own timer ends with the first byte that follows an answer.
        if self.cycle is None or self.cycle.response_complete:
            self._state.begin(self, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._state.end(self)
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.end(self)
        super().connection_lost(exc)

    @property
    def _state(self) -> Waiting:
        return cast("_State", self.server_state).waiting
