"""Wires the gateway together: upstream clients, hub, application, HTTP server."""

from __future__ import annotations

import asyncio
import socket

from areal.chassis.http_auth import OwnPagesOnly
from areal.chassis.http_server import HttpServer
from areal.chassis.service import Service, ServiceContext, split_address
from areal.clients.base import Client
from areal.clients.buffer.admin import BufferAdmin
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.tasks import BufferTasks
from areal.clients.rollout import RolloutClient
from areal.clients.trainer import TrainerClient
from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import GRPOConfig
from areal.errors import ConfigError
from areal_gateway.app import build_app
from areal_gateway.config import GatewayConfig
from areal_gateway.hub import StatusHub
from areal_gateway.login import Sessions
from areal_gateway.metrics import GatewayMetrics
from areal_gateway.sources import watch_clock, watch_trainer, watch_versions


class GatewayService(Service):
    """HTTP on the service's address; no gRPC of its own."""

    def __init__(
        self, config: GRPOConfig, context: ServiceContext, limits: GatewayConfig | None = None
    ) -> None:
        """Wires; starts nothing. `limits` is for tests that cannot wait."""
        self._context = context
        self._limits = limits or GatewayConfig()
        ends, security = config.endpoints, context.security
        self._buffer = BufferConnection(ends.buffer, security) if ends.buffer else None
        self._weight_sync = (
            WeightSyncClient(ends.weight_sync, security) if ends.weight_sync else None
        )
        self._trainer = TrainerClient(ends.trainer, security) if ends.trainer else None
        self._rollout = (
            RolloutClient(ends.rollout, security, timeout_s=30.0, retry_s=0.0)
            if ends.rollout
            else None
        )
        configured = {
            "ledger": self._buffer,
            "servers": self._weight_sync,
            "trainer": self._trainer,
        }
        self._hub = StatusHub(
            {
                "experiment": config.experiment_name,
                "trial": config.trial_name,
                "model": config.model.path,
                "total_train_steps": config.total_train_steps,
                "batch_size": config.train_dataset.batch_size,
                "n_samples": config.gconfig.n_samples,
                "max_head_offpolicyness": config.rollout.max_head_offpolicyness,
                "max_concurrent_rollouts": config.rollout.max_concurrent_rollouts,
            },
            history=self._limits.history,
            max_rows=self._limits.max_rows,
            configured=[name for name, client in configured.items() if client is not None],
        )
        metrics = GatewayMetrics(context.registry)
        context.waits.watch(self._hub.waits)
        sessions = Sessions(security, config.namespace) if security.token else None
        app = build_app(
            self._hub,
            self._rollout,
            BufferAdmin(self._buffer) if self._buffer else None,
            metrics,
            context.waits,
            self._limits,
            sessions,
        )
        if sessions is None:
            app.add_middleware(OwnPagesOnly, security=security)
        self._http = HttpServer(
            app,
            log_level="warning",
            timeout_graceful_shutdown=int(self._limits.drain_s),
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens at once: the page is there before the run is."""
        host, port = split_address(self._context.listen, "--listen")
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"--listen {self._context.listen}: cannot listen there: {error.strerror}"
            ) from None
        spawn, keep = self._context.background.spawn, self._context.background.keep
        self._serving = spawn(self._http.serve(sockets=[listener]), "http")
        tasks = BufferTasks(self._buffer) if self._buffer else None
        keep(watch_clock(self._hub, tasks, self._weight_sync, self._limits), "clock")
        if self._weight_sync is not None:
            keep(watch_versions(self._hub, self._weight_sync), "versions")
        if self._trainer is not None:
            keep(watch_trainer(self._hub, self._trainer, self._limits), "trainer")

    async def drain(self) -> None:
        """Ends event streams, finishes running requests, stops listening."""
        self._hub.close()
        self._http.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=self._limits.drain_s + 1.0)

    async def close(self) -> None:
        clients: list[Client | None] = [
            self._buffer,
            self._weight_sync,
            self._trainer,
            self._rollout,
        ]
        for client in clients:
            if client is not None:
                await client.close()


def build(config: GRPOConfig, context: ServiceContext) -> Service:
    """Makes the service; does no I/O."""
    return GatewayService(config, context)
