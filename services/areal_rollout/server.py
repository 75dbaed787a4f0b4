"""Wires the rollout service: buffer, reward, weight-sync, NATS and HTTP around the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from areal.chassis.service import Registration, Server, ServiceContext, run_service
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.sessions import BufferSessions
from areal.clients.buffer.tasks import BufferRecipes, BufferTasks
from areal.clients.buffer.worker import BufferWorker
from areal.clients.reward import RewardClient
from areal.clients.trainer import TrainerClient
from areal.clients.weight_sync import WeightSyncClient
from areal.model_directory import RouteShape
from areal.tokenizer import Tokenizer
from areal.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from areal_rollout.announcements import Announcements
from areal_rollout.config import RolloutConfig
from areal_rollout.executor import Executor
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable
from areal_rollout.load_watch import LoadWatch
from areal_rollout.metrics import RolloutMetrics
from areal_rollout.server_refresh import ServerRefresh
from areal_rollout.servicer import RolloutService
from areal_rollout.sessions import Sessions
from areal_rollout.workflows import WorkflowCache


class RolloutServer(Server):
    """The process of a rollout worker."""

    def __init__(self, config: RolloutConfig, context: ServiceContext) -> None:
        self._config, self._context, security = config, context, context.security
        own, buffer = context.own, context.own(BufferConnection(config.buffer, security))
        self._worker = own(BufferWorker(buffer))
        self._reward = own(RewardClient(config.reward, security))
        self._weight_sync = own(WeightSyncClient(config.weight_sync, security))
        self._trainer = own(TrainerClient(config.trainer, security)) if config.trainer else None
        self._announcements = own(Announcements(config.nats, config.namespace, security.nats_token))
        self._metrics, self._table = RolloutMetrics(context.registry), ServerTable()
        self._workflows = WorkflowCache(BufferRecipes(buffer).get_recipe)
        self._sessions = Sessions(BufferSessions(buffer), self._worker, config, self._metrics)
        self._service = RolloutService(BufferTasks(buffer), self._workflows.get, self._sessions)
        self._executor: Executor | None = None

    def registrations(self) -> Sequence[Registration]:
        add = partial(add_RolloutServiceServicer_to_server, self._service)
        return [("areal.v1.RolloutService", add)]

    async def start(self) -> None:
        """Reads the tokenizer, learns of the servers, begins to lease."""
        config, table, metrics = self._config, self._table, self._metrics
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.tokenizer_dir, config.model_dir)
        stops, model = tuple(tokenizer.eos_token_ids), str(config.model_dir)
        routes = RouteShape.of_folder(config.model_dir) if config.router_replay else None
        limits = ModelLimits(tokenizer.vocab_size, config.context_length, stops, model, routes)
        generation = SGLangClient(
            table,
            limits,
            report=self._weight_sync.report_server,
            observer=metrics,
            request_timeout_s=config.request_timeout_s,
            setup_timeout_s=config.setup_timeout_s,
            asleep_s=config.asleep_s,
            headers=self._context.security.headers(),
            previous=self._context.security.previous_headers(),
            connections=config.connections,
        )
        await self._context.own(generation).start()
        self._executor = executor = Executor(
            config,
            buffer=self._worker,
            generation=generation,
            scorer=self._reward,
            workflows=self._workflows,
            tokenizer=tokenizer,
            observer=metrics,
            session_group=self._sessions.group,
        )
        self._sessions.start(generation, tokenizer)
        refresh = ServerRefresh(table, self._weight_sync.list_changes)
        load_watch = LoadWatch(self._trainer, table.__len__, executor.busy_s, metrics.recommended)
        self._context.waits.watch(executor.waits)
        metrics.watch(lambda: executor.running, executor.oldest_s, table.__len__)
        spawn, keep = self._context.background.spawn, self._context.background.keep
        keep(refresh.follow(), "server-refresh")
        spawn(self._announcements.listen(refresh.announce), "announcements")
        keep(executor.keep_leases(), "leases")
        keep(load_watch.run(), "load")
        spawn(executor.run(), "episodes")

    async def drain(self) -> None:
        """Returns every lease with its partial work."""
        if self._executor is not None:
            await self._executor.drain(self._config.drain_s)


def main() -> None:
    """Serves until told to stop."""
    run_service("rollout", RolloutConfig.from_experiment, RolloutServer)
