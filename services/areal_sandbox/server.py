"""Wires the sandbox service: boxes, leases, gRPC and the E2B-compatible HTTP side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from areal.addresses import join_address
from areal.chassis.service import Registration, Server, ServiceContext, run_service, split_address
from areal.sandbox import Sandbox
from areal.sandbox.box import Box
from areal.v1.sandbox_service_pb2_grpc import add_SandboxServiceServicer_to_server
from areal_sandbox.config import SandboxConfig, check_secrets, forget_secrets
from areal_sandbox.e2b.app import E2BApp
from areal_sandbox.leases import Leases
from areal_sandbox.metrics import SandboxMetrics
from areal_sandbox.servicer import SandboxService


class SandboxServer(Server):
    """The process that has the boxes."""

    def __init__(self, config: SandboxConfig, context: ServiceContext) -> None:
        self._config, self._context = config, context
        self._leases = context.own(
            Leases(
                config,
                partial(Box, None, config.isolation),
                Sandbox(isolation=config.isolation),
                context.background.spawn,
                SandboxMetrics(context.registry),
            )
        )
        self._service = SandboxService(self._leases, _reachable(context.listen), context.waits)
        self._e2b = context.own(E2BApp(self._leases, context.security)) if config.http else None

    def registrations(self) -> Sequence[Registration]:
        add = partial(add_SandboxServiceServicer_to_server, self._service)
        return [("areal.v1.SandboxService", add)]

    async def start(self) -> None:
        """Runs a program in a box, and listens for HTTP; refuses if boxes keep nothing apart."""
        check_secrets(self._config)
        forget_secrets()
        await self._leases.start()
        self._context.background.keep(self._leases.refill(), "warm-boxes")
        if self._e2b is not None:
            host, _ = split_address(self._context.listen, "--listen")
            _, port = split_address(urlsplit(self._config.http).netloc, "endpoints.sandbox_http")
            await self._e2b.start(host, port)

    async def drain(self) -> None:
        """Destroys all boxes: what runs in them has no other end."""
        await asyncio.shield(self._leases.drain())


def _reachable(listen: str) -> str:
    """Returns the address at which other processes reach this one: a wildcard is not an address."""
    host, _, port = listen.rpartition(":")
    if host in ("0.0.0.0", "[::]"):  # noqa: S104  (compared)
        family = socket.AF_UNSPEC if host == "[::]" else socket.AF_INET
        found = socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM)
        host = str(found[0][4][0])
    return join_address(host, port)


def main() -> None:
    """Serves until told to stop."""
    run_service("sandbox", SandboxConfig.from_experiment, SandboxServer)
