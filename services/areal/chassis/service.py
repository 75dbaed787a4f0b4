"""One process, one service.

        argv ──> config ──> build(config, context) ──> start() ──> SERVING
                                                                     │ SIGTERM / SIGINT,
                                                                     │ or a background task failed
                                                                     v
                                        exit <── close() <── drain() NOT_SERVING

| state    | consumes            | waits for                  | unblocked by             |
|----------|---------------------|----------------------------|--------------------------|
| starting | nothing             | the service's dependencies | they answer, or deadline |
| serving  | RPCs, /metrics      | a signal                   | SIGTERM, SIGINT, failure |
| draining | running RPCs        | drain(), at most grace_s   | drain() returns          |
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import uvloop
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest

from areal.chassis import tracing
from areal.chassis.addresses import split_host
from areal.chassis.authentication import Doorkeeper, TokenInterceptor
from areal.chassis.background import Background
from areal.chassis.health import BoundedHealthServicer
from areal.chassis.http_app import HttpApp
from areal.chassis.http_connections import HEAD_WITHIN_S
from areal.chassis.interceptors import CallInterceptor
from areal.chassis.logging import configure_logging, get_logger
from areal.chassis.process import hide_memory, open_files
from areal.chassis.waits import Waits, WaitsCollector
from areal.config.experiment import GRPOConfig, load_service_config
from areal.errors import ArealError, ConfigError
from areal.security import Security

MAX_MESSAGE_BYTES = 128 * 1024 * 1024
_CONNECTION_AGE_MS = 60_000

# (full service name, function that adds the servicer to a server)
Registration = tuple[str, Callable[[grpc.aio.Server], None]]
Config = TypeVar("Config")


class Closable(Protocol):
    """A connection, or an object that holds connections."""

    async def close(self) -> None: ...


Owned = TypeVar("Owned", bound=Closable)


class ServiceContext:
    """What the chassis provides to a service: background tasks, metrics, waits, secrets."""

    def __init__(
        self,
        name: str,
        listen: str,
        background: Background | None,
        security: Security | None = None,
    ) -> None:
        self.name = name
        self.listen = listen
        """host:port of the service; where the gateway serves HTTP."""
        self.security = security or Security()
        """What its servers ask for, and what its clients present."""
        self._background = background
        self.closing = AsyncExitStack()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.waits = Waits()
        WaitsCollector(name, self.waits, self.registry)

    def own(self, opened: Owned) -> Owned:
        """Registers a connection; connections are closed after the service, in reverse order."""
        self.closing.push_async_callback(opened.close)
        return opened

    @property
    def background(self) -> Background:
        """Owns the service's long-running tasks."""
        assert self._background is not None, "this process runs no background tasks"
        return self._background


class Server:
    """Base of a service's process; a service overrides the methods that it needs."""

    def registrations(self) -> Sequence[Registration]:
        """The gRPC services; if there are none, no gRPC server is started."""
        return ()

    async def start(self) -> None:
        """Connects and begins; returns when ready to serve. Raise ArealError to give up."""

    async def drain(self) -> None:
        """Stops taking work and returns what the service holds; bounded by the grace period."""

    async def close(self) -> None:
        """Releases the service's connections."""


def split_address(address: str, key: str) -> tuple[str, int]:
    """Splits `host:port`, an IPv6 host in brackets; raises ConfigError that names `key`."""
    try:
        return split_host(address)
    except ConfigError as error:
        raise ConfigError(f"{key} {error}") from None


def check_address(address: str, key: str, security: Security) -> None:
    """Refuses an address that is taken, or open to the network without a token, in one line."""
    host, port = split_address(address, key)
    security.check_bind(host, key)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{key} {address}: cannot listen there: {error.strerror}") from None


class _Pages(HttpApp):
    """What a service tells probes and Prometheus about itself."""

    open_paths = frozenset({"/healthz", "/livez"})

    def __init__(
        self, context: ServiceContext, serving: asyncio.Event, doorkeeper: Doorkeeper
    ) -> None:
        super().__init__(context.security)
        self._context, self._serving, self._doorkeeper = context, serving, doorkeeper

    def routes(self) -> list[web.RouteDef]:
        pages = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/livez": self._livez,
            "/waits": self._waits,
        }
        return [web.get(path, page) for path, page in pages.items()]

    def admits(self, request: web.Request) -> bool:
        """Counts those that may not pass."""
        return request.path in self.open_paths or self._doorkeeper.admits(
            request.headers.get("Authorization"), "http"
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._context.registry),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    async def _healthz(self, _: web.Request) -> web.Response:
        ready = self._serving.is_set()
        return web.json_response(
            {"service": self._context.name, "serving": ready}, status=200 if ready else 503
        )

    async def _livez(self, _: web.Request) -> web.Response:
        # Also while the service starts, stands by or drains: only a process that hangs is silent.
        return web.json_response({"service": self._context.name, "alive": True})

    async def _waits(self, _: web.Request) -> web.Response:
        return web.json_response(self._context.waits.as_json(self._context.name))


async def _start_grpc(
    context: ServiceContext,
    registrations: Sequence[Registration],
    health_servicer: BoundedHealthServicer,
    doorkeeper: Doorkeeper,
) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=[
            TokenInterceptor(doorkeeper),
            CallInterceptor(context.name, context.registry),
        ],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            # A process that was starved finds its clients' pings in a heap: no reason to hang up.
            ("grpc.http2.max_ping_strikes", 0),
            # Those that connect and say nothing, then those that no one calls on; and descriptors
            # stay for the rest of the process however many connect.
            ("grpc.server_handshake_timeout_ms", int(1000 * HEAD_WITHIN_S)),
            ("grpc.max_connection_idle_ms", 600_000),
            # Calls in progress stay on the connection. The client looks the name up again, and so
            # finds replicas that were added.
            ("grpc.max_connection_age_ms", _CONNECTION_AGE_MS),
            ("grpc.max_allowed_incoming_connections", max(1, open_files() // 2)),
        ],
    )
    for _, add in registrations:
        add(server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        (*(name for name, _ in registrations), health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    if (tls := context.security.tls) is None:
        server.add_insecure_port(context.listen)
    else:
        pair = (tls.key, tls.certificate)
        credentials = grpc.ssl_server_credentials([pair], tls.authorities, require_client_auth=True)
        server.add_secure_port(context.listen, credentials)
    await server.start()
    return server


class Listeners:
    """The servers of one process, gRPC and HTTP; they serve as long as this is referenced."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._serving = asyncio.Event()
        self.rpc: grpc.aio.Server | None = None
        self._http: HttpApp | None = None
        self._names = [""]

    async def start(self, server: Server, metrics: str) -> None:
        """Starts to listen; health answers NOT_SERVING."""
        context = self._context
        doorkeeper = Doorkeeper(context.name, context.security, context.registry)
        if metrics:
            host, port = split_address(metrics, "--metrics")
            context.security.check_bind(host, "--metrics")
            self._http = _Pages(context, self._serving, doorkeeper)
            await self._http.start(host, port)
        registrations = server.registrations()
        self._names += [name for name, _ in registrations]
        self._health = BoundedHealthServicer(self._names)
        await self.serve(False)
        if registrations:
            self.rpc = await _start_grpc(context, registrations, self._health, doorkeeper)

    async def serve(self, serving: bool) -> None:
        """Sets health on both servers: serving or not."""
        (self._serving.set if serving else self._serving.clear)()
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Ends calls in progress after `grace_s` seconds, and frees both ports."""
        if self.rpc is not None:
            await self.rpc.stop(grace_s)
        if self._http is not None:
            await self._http.close()


async def listen_in(context: ServiceContext, server: Server, metrics: str) -> Listeners:
    """Serves gRPC and HTTP in a process that has its own main loop (the trainer)."""
    listeners = Listeners(context)
    await listeners.start(server, metrics)
    await listeners.serve(True)
    return listeners


async def _serve(
    name: str,
    build: Callable[[ServiceContext], Server],
    security: Security,
    address: str,
    metrics: str,
    grace_s: float,
) -> int:
    """Runs one service until told to stop; returns the exit code."""
    log = get_logger(__name__)
    check_address(address, "--listen", security)
    background = Background()
    context = ServiceContext(name, address, background, security)
    server = build(context)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    listeners = Listeners(context)
    await listeners.start(server, metrics)
    starting = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        ends: set[asyncio.Future[Any]] = {stopping, background.failed}
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            if not background.failed.done():  # what failed in it has ended the start, too
                # Start-up garbage never dies: keep the collector from walking it again and again.
                gc.freeze()
                await listeners.serve(True)
                log.info("serving", listen=address, metrics=metrics)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        code = 1 if background.failed.done() else 0
        await listeners.serve(False)
        log.info("draining", grace_s=grace_s)
        try:
            await asyncio.wait_for(server.drain(), grace_s)
        except TimeoutError:
            log.warning("drain_incomplete", waited_s=grace_s)
        return code
    finally:
        for waiting in (starting, stopping):
            waiting.cancel()
        await listeners.stop(1.0)
        await background.cancel()
        await server.close()
        await context.closing.aclose()
        log.info("stopped")


def run_service(
    name: str,
    read: Callable[[GRPOConfig], Config],
    build: Callable[[Config, ServiceContext], Server],
) -> None:
    """Runs as the `main` of every service: parses argv, serves until told to stop, exits.

    Args:
        name: E.g. "buffer"; also in logs and metric names.
        read: Takes what the service needs from the experiment file.
        build: Makes the service's process; does no I/O.
    """
    parser = argparse.ArgumentParser(prog=f"areal-{name}", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="The experiment file.")
    parser.add_argument("--listen", required=True, help="host:port to serve on.")
    parser.add_argument(
        "--metrics", default="", help="host:port for /metrics, /healthz and /livez."
    )
    parser.add_argument(
        "--grace", type=float, default=20.0, help="Time to finish calls after SIGTERM, in seconds."
    )
    parser.add_argument(
        "--log-text", action="store_true", help="Write plain log lines instead of JSON."
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args()
    hide_memory()
    open_files()
    try:
        loaded = load_service_config(asked.config, asked.overrides)
        configure_logging(name, loaded.namespace, text=asked.log_text)
        made, security = partial(build, read(loaded)), Security.load(loaded.security)
        with tracing.exporting(f"areal-{name}", loaded.namespace):
            code = uvloop.run(
                _serve(name, made, security, asked.listen, asked.metrics, asked.grace)
            )
    except ArealError as error:
        print(f"areal-{name}: {error}", file=sys.stderr)  # noqa: T201 - the one line for people
        code = 2
    sys.exit(code)
