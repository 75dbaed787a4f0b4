"""Wires the gateway: clients of the other services, the run's status, the HTTP application."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from areal.chassis.http_auth import BearerAuth
from areal.chassis.http_server import HttpServer, bind
from areal.chassis.service import Server, ServiceContext, run_service, split_address
from areal.clients.base import Client
from areal.clients.buffer.admin import BufferAdmin
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.sessions import BufferSessions
from areal.clients.buffer.tasks import BufferTasks
from areal.clients.rollout import RolloutClient
from areal.clients.trainer import TrainerClient
from areal.clients.weight_sync import WeightSyncClient
from areal_gateway.app import build_app
from areal_gateway.config import GatewayConfig
from areal_gateway.login import Sessions
from areal_gateway.metrics import GatewayMetrics
from areal_gateway.pollers import watch_clock, watch_trainer, watch_versions
from areal_gateway.status import RunStatus

C = TypeVar("C", bound=Client)


class GatewayServer(Server):
    """HTTP on the service's address; no gRPC of its own."""

    def __init__(self, config: GatewayConfig, context: ServiceContext) -> None:
        self._config, self._context = config, context
        ends, security = config.endpoints, context.security
        buffer = self._client(BufferConnection, ends.buffer)
        self._tasks = BufferTasks(buffer) if buffer else None
        self._weight_sync = self._client(WeightSyncClient, ends.weight_sync)
        self._trainer = self._client(TrainerClient, ends.trainer)
        asked = {"ledger": buffer, "servers": self._weight_sync, "trainer": self._trainer}
        self._run = RunStatus(
            config.facts,
            history=config.history,
            max_rows=config.max_rows,
            expected=config.findings,
            configured=[name for name, client in asked.items() if client is not None],
        )
        context.waits.watch(self._run.waits)
        sessions = Sessions(security, config.namespace) if security.token else None
        app = build_app(
            self._run,
            self._client(RolloutClient, ends.rollout, timeout_s=30.0, retry_s=0.0),
            BufferAdmin(buffer) if buffer else None,
            GatewayMetrics(context.registry),
            context.waits,
            config,
            sessions,
            BufferSessions(buffer) if buffer else None,
        )
        if sessions is None:
            app.add_middleware(BearerAuth, security=security, open_paths=frozenset())
        drain_s = int(config.drain_s)
        self._http = HttpServer(app, log_level="warning", timeout_graceful_shutdown=drain_s)
        self._serving: asyncio.Task[None] | None = None

    def _client(
        self,
        kind: type[C],
        address: str,
        timeout_s: float | None = None,
        retry_s: float | None = None,
    ) -> C | None:
        if not address:
            return None
        security = self._context.security
        return self._context.own(kind(address, security, timeout_s=timeout_s, retry_s=retry_s))

    async def start(self) -> None:
        """Listens at once: the page is there before the run is."""
        listener = bind(*split_address(self._context.listen, "--listen"), "--listen")
        spawn, keep = self._context.background.spawn, self._context.background.keep
        self._serving = spawn(self._http.serve(sockets=[listener]), "http")
        keep(watch_clock(self._run, self._tasks, self._weight_sync, self._config), "clock")
        if self._weight_sync is not None:
            keep(watch_versions(self._run, self._weight_sync), "versions")
        if self._trainer is not None:
            keep(watch_trainer(self._run, self._trainer, self._config), "trainer")

    async def drain(self) -> None:
        """Ends event streams, finishes running requests, stops listening."""
        self._run.close()
        self._http.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=self._config.drain_s + 1.0)


def main() -> None:
    """Serves until told to stop."""
    run_service("gateway", GatewayConfig.from_experiment, GatewayServer)
