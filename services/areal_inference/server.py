"""Wiring and life of the process: bind, answer 503, load the model, serve, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Route as StarletteRoute

from areal.chassis import tracing
from areal.chassis.http_auth import BearerAuth, OwnPagesOnly
from areal.chassis.http_server import HttpServer
from areal.chassis.http_tracing import TracedRequests
from areal.chassis.logging import get_logger
from areal.errors import ConfigError
from areal.security import Security
from areal_inference.config import InferenceConfig
from areal_inference.decode.engine import EngineError
from areal_inference.http_api.control import control_routes
from areal_inference.http_api.generation import generate_route
from areal_inference.http_api.info import info_routes
from areal_inference.model.config import ModelConfig
from areal_inference.service import Service

_DRAIN_S = 5.0
_SWITCH_INTERVAL_S = 0.0005


_OPEN_PATHS = frozenset({"/health", "/ready"})


def build_app(service: Service, security: Security) -> Starlette:
    """The HTTP application of a service; /generate first, for its route is looked up in order."""
    routes = [StarletteRoute("/generate", generate_route(service), methods=["POST"])]
    app = Starlette(
        routes=[*routes, *info_routes(service), *control_routes(service, security.headers())]
    )
    if security.token:
        app.add_middleware(BearerAuth, security=security, open_paths=_OPEN_PATHS)
    else:
        app.add_middleware(OwnPagesOnly, security=security)
    if tracing.enabled():
        app.add_middleware(TracedRequests)
    return app


async def serve(config: InferenceConfig) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit code: 0, or 1 if the engine failed.

    Raises:
        ConfigError: port in use, broken tokenizer, no token on an address that others reach.
        ModelError: the model folder is missing, broken or of an unsupported kind.
    """
    log = get_logger("areal_inference.server")
    security = Security.of_token_file(
        config.token_file or "", allow_insecure_bind=config.allow_insecure_bind
    )
    security.check_bind(config.host, "inference.host")
    model = ModelConfig.from_folder(Path(config.model_path))
    # The engine releases the interpreter at every tensor operation; it must get it back quickly
    # from the HTTP side, or a burst of requests would stall generation.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    stop = asyncio.Event()
    failures: list[Exception] = []

    def on_failure(error: Exception) -> None:
        failures.append(error)
        stop.set()

    service = Service(config, model, on_failure)
    listener = _bind(config.host, config.port)
    host, port = listener.getsockname()[:2]
    server = HttpServer(
        build_app(service, security),
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=int(_DRAIN_S),
        timeout_keep_alive=75,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    log.info("listening", url=f"http://{host}:{port}", model_path=config.model_path)
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(service.engine.start())
    try:
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            # What was loaded so far never dies: keep the collector from walking it (0.1 s) again.
            gc.freeze()
            service.ready = True
            log.info("ready", weight_version=config.weight_version)
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        log.info("stopping", running=len(service.live))
        stopping.cancel()
        await _drain(service)
        server.should_exit = True
        await serving
        # A thread that still loads a model, or sits in a long step, ends with the process.
        with contextlib.suppress(EngineError):
            await service.engine.stop(_DRAIN_S)
        loading.cancel()
    for failure in failures:
        log.error("engine_failed", exc_info=failure)
    return 1 if failures else 0


async def _drain(service: Service) -> None:
    """Refuse new requests and finish the running ones with what they have."""
    service.draining = True
    if service.ready and service.engine.failure is None:
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(_DRAIN_S):
                await service.abort(None, "server is shutting down")


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener
