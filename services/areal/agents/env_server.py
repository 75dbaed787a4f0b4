"""The wire of `verifiers`' EnvServer: msgpack over ZeroMQ, as in its version 0.4.

us (DEALER)                                    EnvServer (ROUTER)
[id, b"run", request]            ──>
                                 <──           [id, b"delta", a trace's new part]   many
                                 <──           [id, b"reply", how it ended]         one
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from areal.errors import InvalidInput, Unavailable, WorkflowError

CONNECT_TIMEOUT_S = 10.0


def check_address(address: str) -> None:
    """Raises InvalidInput for what is no address, or if a package is missing."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or parts.port is None:
        raise InvalidInput(f"server {address!r}: expected tcp://HOST:PORT")
    _module("zmq.asyncio")
    _module("msgpack")


def host_towards(address: str) -> str:
    """Returns this machine's address as the server's machine sees it; sends nothing."""
    parts = urlsplit(address)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"{address}: {error}") from None


class EnvServer:
    """A connection, inside `async with`; any number of requests at once.

    Example:
        >>> async with EnvServer("tcp://127.0.0.1:5000") as server:
        ...     head, traces = await server.run(request, timeout_s=600)
    """

    def __init__(self, address: str) -> None:
        """Connects to nothing yet; see `check_address`."""
        self.address = address
        self._zmq, self._msgpack = _module("zmq.asyncio"), _module("msgpack")
        self._replies: dict[bytes, asyncio.Future[dict[str, Any]]] = {}
        self._deltas: dict[bytes, Callable[[dict[str, Any]], None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        zmq = _module("zmq")
        self._socket = self._zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms; a cancellation is still sent
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self.address)
        self._tasks = [asyncio.create_task(work()) for work in (self._receive, self._watch)]
        try:
            await self._ask(b"health", {}, CONNECT_TIMEOUT_S)
        except TimeoutError:
            await self._close()
            raise Unavailable(
                f"{self.address}: no EnvServer answered within {CONNECT_TIMEOUT_S:g} s"
            ) from None
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def run(
        self, request: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Has one episode played.

        Args:
            request: `task_data`, `client`, `model` and `sampling` of a RunRequest.
            timeout_s: Limit of the episode; when it passes, the server is told to stop.

        Returns:
            (the episode without its traces, its traces: each with `id`, `agent`, `rewards`, `ok`,
            `errors`, `nodes` and more).

        Raises:
            WorkflowError: The server could not play it, or not within the limit.
            Unavailable: The connection was lost.
        """
        traces: dict[str, dict[str, Any]] = {}

        def add(delta: dict[str, Any]) -> None:
            if delta.get("discard"):  # of an attempt that the server repeats
                traces.pop(delta["trace"], None)
                return
            trace = traces.setdefault(
                delta["trace"], {**delta.get("open", {}), "nodes": [], "errors": []}
            )
            trace.update(delta.get("set", {}))
            for name in ("nodes", "errors"):
                trace[name] += delta.get(name, [])

        try:
            reply = await self._ask(b"run", request, timeout_s, add)
        except TimeoutError:
            raise WorkflowError(
                f"{self.address}: the episode did not end within {timeout_s:g} s"
            ) from None
        if not reply.get("success"):
            raise WorkflowError(f"{self.address}: run: {reply.get('error')}")
        sizes = {each["id"]: each["nodes"] for each in reply["traces"]}
        if sizes != {known: len(trace["nodes"]) for known, trace in traces.items()}:
            raise WorkflowError(f"{self.address}: run: parts of the episode's traces are missing")
        return reply["head"], [traces[known] for known in sizes]

    async def _ask(
        self,
        route: bytes,
        body: dict[str, Any],
        timeout_s: float,
        on_delta: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        known = uuid.uuid4().hex.encode()
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[known] = reply
        if on_delta is not None:
            self._deltas[known] = on_delta
        await self._send(known, route, body)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except (TimeoutError, asyncio.CancelledError):
            if route == b"run":
                cancel = {"request_id": known.decode()}
                await self._send(uuid.uuid4().hex.encode(), b"cancel", cancel)
            raise
        finally:
            self._replies.pop(known, None)
            self._deltas.pop(known, None)

    async def _send(self, known: bytes, route: bytes, body: dict[str, Any]) -> None:
        await self._socket.send_multipart([known, route, self._msgpack.packb(body)])

    async def _receive(self) -> None:
        while True:
            known, kind, data = await self._socket.recv_multipart()
            body = self._msgpack.unpackb(data, strict_map_key=False)
            if kind == b"delta":
                if (on_delta := self._deltas.get(known)) is not None:
                    on_delta(body)
            elif (reply := self._replies.get(known)) is not None and not reply.done():
                reply.set_result(body)

    async def _watch(self) -> None:
        """Watches the connection: ZeroMQ reconnects on its own, but pending requests are lost."""
        while True:
            await self._monitor.recv_multipart()
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(Unavailable(f"{self.address}: the connection was lost"))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise InvalidInput(
            f"module {name!r}: not installed where the recipe runs; pip install pyzmq msgpack"
        ) from None
