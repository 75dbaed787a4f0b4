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
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest

from areal.chassis import tracing
from areal.chassis.authentication import Doorkeeper, TokenInterceptor, http_middleware
from areal.chassis.background import Background
from areal.chassis.health import BoundedHealthServicer
from areal.chassis.http_connections import HEAD_WITHIN_S, IDLE_S, HttpSite
from areal.chassis.interceptors import CallInterceptor
from areal.chassis.logging import configure_logging, get_logger
from areal.chassis.open_files import open_files
from areal.chassis.privacy import hide_memory
from areal.chassis.waits import Waits, WaitsCollector
from areal.config.experiment import GRPOConfig, load_service_config
from areal.errors import ArealError, ConfigError
from areal.security import Security

MAX_MESSAGE_BYTES = 128 * 1024 * 1024

# (full service name, function that adds the servicer to a server)
Registration = tuple[str, Callable[[grpc.aio.Server], None]]


class ServiceContext:
    """What the chassis lends a service: background tasks, metrics, its waits, its secrets."""

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
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.waits = Waits()
        WaitsCollector(name, self.waits, self.registry)

    @property
    def background(self) -> Background:
        """Owner of the service's long-running tasks."""
        assert self._background is not None, "this process runs no background tasks"
        return self._background


class Service:
    """Base of every service: override what is needed."""

    def registrations(self) -> Sequence[Registration]:
        """The gRPC services; none: no gRPC server is started."""
        return ()

    async def start(self) -> None:
        """Connects and begins; returns when ready to serve. Raise ArealError to give up."""

    async def drain(self) -> None:
        """Stops taking work and hands back what is held; bounded by the grace period."""

    async def close(self) -> None:
        """Releases connections."""


def split_address(address: str, key: str) -> tuple[str, int]:
    """`host:port` → parts; raises ConfigError naming `key`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{key} {address!r}: expected host:port")
    return host, int(port)


def check_address(address: str, key: str, security: Security) -> None:
    """One clear line for an address that is taken, or that would let strangers in."""
    host, port = split_address(address, key)
    security.check_bind(host, key)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{key} {address}: cannot listen there: {error.strerror}") from None


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Bytes that are no HTTP are answered with 400; aiohttp would log a traceback of each."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _start_http(
    context: ServiceContext, address: str, serving: asyncio.Event, doorkeeper: Doorkeeper
) -> web.AppRunner:
    host, port = split_address(address, "--metrics")
    context.security.check_bind(host, "--metrics")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(context.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def healthz(_: web.Request) -> web.Response:
        ready = serving.is_set()
        return web.json_response(
            {"service": context.name, "serving": ready}, status=200 if ready else 503
        )

    async def waits(_: web.Request) -> web.Response:
        return web.json_response(context.waits.as_json(context.name))

    app = web.Application(middlewares=[http_middleware(doorkeeper)])
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/waits", waits)]
    )
    logger = logging.getLogger("aiohttp.server")
    logger.addFilter(_is_our_fault)
    runner = web.AppRunner(app, access_log=None, logger=logger, keepalive_timeout=IDLE_S)
    await runner.setup()
    await HttpSite(runner, host, port).start()
    return runner


async def _start_grpc(
    context: ServiceContext, service: Service, doorkeeper: Doorkeeper
) -> tuple[grpc.aio.Server | None, BoundedHealthServicer, list[str]]:
    registrations = service.registrations()
    names = [name for name, _ in registrations]
    health_servicer = BoundedHealthServicer(names)
    if not registrations:
        return None, health_servicer, names
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
            ("grpc.max_allowed_incoming_connections", max(1, open_files() // 2)),
        ],
    )
    for _, add in registrations:
        add(server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    if (tls := context.security.tls) is None:
        server.add_insecure_port(context.listen)
    else:
        pair = (tls.key, tls.certificate)
        credentials = grpc.ssl_server_credentials([pair], tls.authorities, require_client_auth=True)
        server.add_secure_port(context.listen, credentials)
    await server.start()
    return server, health_servicer, names


@dataclass(frozen=True)
class Servers:
    """What `start_servers` started; it serves as long as this is referenced."""

    rpc: grpc.aio.Server | None
    http: web.AppRunner | None

    async def stop(self, grace_s: float) -> None:
        """Ends calls in progress after `grace_s` seconds, and frees both ports."""
        if self.rpc is not None:
            await self.rpc.stop(grace_s)
        if self.http is not None:
            await self.http.cleanup()


async def start_servers(context: ServiceContext, service: Service, metrics: str) -> Servers:
    """Serves gRPC and HTTP in a process with a main loop of its own (the trainer)."""
    serving = asyncio.Event()
    doorkeeper = Doorkeeper(context.name, context.security, context.registry)
    http = await _start_http(context, metrics, serving, doorkeeper) if metrics else None
    server, health_servicer, names = await _start_grpc(context, service, doorkeeper)
    for each in ("", *names):
        await health_servicer.set(each, health_pb2.HealthCheckResponse.SERVING)
    serving.set()
    return Servers(server, http)


async def _serve(
    name: str,
    build: Callable[[GRPOConfig, ServiceContext], Service],
    config: GRPOConfig,
    listen: str,
    metrics: str,
    grace_s: float,
) -> int:
    """Runs one service until told to stop; returns the exit code."""
    log = get_logger("areal.chassis")
    security = Security.load(config.security)
    check_address(listen, "--listen", security)
    background = Background()
    context = ServiceContext(name, listen, background, security)
    service = build(config, context)
    serving, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)

    doorkeeper = Doorkeeper(name, security, context.registry)
    http = await _start_http(context, metrics, serving, doorkeeper) if metrics else None
    server, health_servicer, names = await _start_grpc(context, service, doorkeeper)

    async def set_health(status: Any) -> None:
        for each in ("", *names):
            await health_servicer.set(each, status)

    await set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    starting = asyncio.ensure_future(service.start())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        ends: set[asyncio.Future[Any]] = {stopping, background.failed}
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            # Start-up garbage never dies: keep the collector from walking it again and again.
            gc.freeze()
            await set_health(health_pb2.HealthCheckResponse.SERVING)
            serving.set()
            log.info("serving", listen=listen, metrics=metrics)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        code = 1 if background.failed.done() else 0
        serving.clear()
        await set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        log.info("draining", grace_s=grace_s)
        try:
            await asyncio.wait_for(service.drain(), grace_s)
        except TimeoutError:
            log.warning("drain_incomplete", waited_s=grace_s)
        return code
    finally:
        for waiting in (starting, stopping):
            waiting.cancel()
        if server is not None:
            await server.stop(1.0)
        await background.cancel()
        await service.close()
        if http is not None:
            await http.cleanup()
        log.info("stopped")


def run_service(
    name: str, build: Callable[[GRPOConfig, ServiceContext], Service], argv: list[str] | None = None
) -> None:
    """The body of every service's `main`: parses argv, serves until told to stop, exits.

    Args:
        name: e.g. "buffer"; also in logs and metric names.
        build: Makes the service; does no I/O.
        argv: Defaults to the process's.
    """
    parser = argparse.ArgumentParser(prog=f"areal-{name}", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="The experiment file.")
    parser.add_argument("--listen", required=True, help="host:port to serve on.")
    parser.add_argument("--metrics", default="", help="host:port of /metrics and /healthz.")
    parser.add_argument("--grace", type=float, default=20.0, help="Seconds to drain in.")
    parser.add_argument("--log-text", action="store_true", help="Plain log lines, not JSON.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args(argv)
    hide_memory()
    open_files()
    try:
        loaded = load_service_config(asked.config, asked.overrides)
        configure_logging(name, loaded.namespace, text=asked.log_text)
        with tracing.exporting(f"areal-{name}", loaded.namespace):
            code = uvloop.run(_serve(name, build, loaded, asked.listen, asked.metrics, asked.grace))
    except ArealError as error:
        print(f"areal-{name}: {error}", file=sys.stderr)  # noqa: T201 - the one line for people
        code = 2
    sys.exit(code)
