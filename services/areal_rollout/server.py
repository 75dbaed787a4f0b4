"""Wires the service: ledger, reward, weight-sync, NATS and HTTP around the executor."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Sequence

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.chassis.open_files import open_files
from areal.chassis.process_name import PROCESS_VARIABLE
from areal.chassis.service import Registration, Service, ServiceContext
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.recipes import BufferRecipes
from areal.clients.buffer.tasks import BufferTasks
from areal.clients.buffer.worker import BufferWorker
from areal.clients.reward import RewardClient
from areal.clients.stores import connect_nats
from areal.clients.trainer import TrainerClient
from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import GRPOConfig
from areal.errors import ConfigError, Unavailable
from areal.tokenizer import Tokenizer
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc
from areal_rollout.config import RolloutSettings
from areal_rollout.executor import Executor
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.connections import RESERVED_FILES
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable
from areal_rollout.load_watch import LoadWatch
from areal_rollout.membership import Membership
from areal_rollout.metrics import RolloutMetrics
from areal_rollout.servicer import RolloutServicer
from areal_rollout.workflows import WorkflowCache

_DRAIN_S = 15.0


class Rollout(Service):
    """The process; see `chassis.Service`."""

    def __init__(self, settings: RolloutSettings, context: ServiceContext) -> None:
        self._settings = settings
        self._context = context
        self._log = get_logger("areal.rollout")
        self._metrics = RolloutMetrics(context.registry)
        self._buffer = BufferConnection(settings.buffer, context.security)
        self._worker = BufferWorker(self._buffer)
        self._reward = RewardClient(settings.reward, context.security)
        self._weight_sync = WeightSyncClient(settings.weight_sync, context.security)
        self._workflows = WorkflowCache(BufferRecipes(self._buffer).get_recipe)
        self._servicer = RolloutServicer(BufferTasks(self._buffer), self._workflows.get)
        self._nats: NatsClient | None = None
        self._generation: SGLangClient | None = None
        self._executor: Executor | None = None
        self._trainer: TrainerClient | None = None

    def registrations(self) -> Sequence[Registration]:
        name = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name
        return [
            (
                name,
                lambda server: pb_grpc.add_RolloutServiceServicer_to_server(self._servicer, server),
            )
        ]

    async def start(self) -> None:
        """Reads the tokenizer, learns of the servers, begins to lease."""
        settings = self._settings
        spawn, keep = self._context.background.spawn, self._context.background.keep
        tokenizer = await asyncio.to_thread(
            Tokenizer.load, settings.tokenizer_dir, settings.model_dir
        )
        connections = max(1, open_files() - RESERVED_FILES)
        table = ServerTable()
        membership = Membership(table, self._weight_sync.list_changes)
        generation = SGLangClient(
            table,
            ModelLimits(
                tokenizer.vocab_size,
                settings.context_length,
                tuple(tokenizer.eos_token_ids),
                str(settings.model_dir),
            ),
            report=self._weight_sync.report_server,
            observer=self._metrics,
            request_timeout_s=settings.request_timeout_s,
            setup_timeout_s=settings.setup_timeout_s,
            headers=self._context.security.headers(),
            connections=connections,
        )
        await generation.start()
        self._generation = generation
        worker_id, boot = _identity()
        executor = Executor(
            settings.executor(worker_id, boot, connections),
            ledger=self._worker,
            generation=generation,
            scorer=self._reward,
            workflows=self._workflows,
            tokenizer=tokenizer,
            observer=self._metrics,
        )
        self._executor = executor
        self._context.waits.watch(executor.waits)
        self._metrics.watch(lambda: executor.running, executor.oldest_s, lambda: len(table))
        keep(membership.follow(), "membership")
        spawn(self._subscribe(membership), "announcements")
        keep(executor.keep_leases(), "leases")
        keep(self._load_watch(executor, table).run(), "load")
        spawn(executor.run(), "episodes")
        capacity = min(settings.capacity, connections)
        self._log.info("worker", worker_id=worker_id, boot=boot, capacity=capacity)

    def _load_watch(self, executor: Executor, table: ServerTable) -> LoadWatch:
        """What an autoscaler of inference servers goes by."""
        if self._settings.trainer:
            self._trainer = TrainerClient(self._settings.trainer, self._context.security)

        def generating_s() -> float:
            executor.account_busy()
            return self._metrics.busy_s

        return LoadWatch(
            self._trainer,
            servers=lambda: len(table),
            generating_s=generating_s,
            report=self._metrics.recommended,
            log=self._log,
        )

    async def _subscribe(self, membership: Membership) -> None:
        """Listens for announcements; without NATS the membership still asks every two seconds."""
        if not self._settings.nats:
            self._log.info("announcements_off", reason="endpoints.nats is empty")
            return
        subject = f"areal.{self._settings.namespace.replace('/', '.')}.servers"

        async def announced(_: Msg) -> None:
            membership.announce()

        backoff = Backoff(0.5, 5.0)
        while self._nats is None:
            try:
                self._nats = await connect_nats(
                    self._settings.nats,
                    "areal-rollout",
                    token=self._context.security.nats_token,
                )
            except Unavailable as error:
                if backoff.fresh:
                    self._log.warning("announcements_away", error=str(error))
                await backoff.sleep()
        # The client subscribes again by itself whenever it has to reconnect.
        await self._nats.subscribe(subject, cb=announced)
        membership.announce()

    async def drain(self) -> None:
        """Hands every lease back with its partial work."""
        if self._executor is not None:
            await self._executor.drain(_DRAIN_S)

    async def close(self) -> None:
        if self._generation is not None:
            await self._generation.close()
        if self._nats is not None:
            await self._nats.close()
        for client in (self._worker, self._buffer, self._reward, self._weight_sync, self._trainer):
            if client is not None:
                await client.close()


def _identity() -> tuple[str, int]:
    """This worker's id, and the number of its life if it has a name that outlives its process.

    The launcher names its processes; so does a pod's `AREAL_PROCESS`. The number is the time in
    microseconds: two lives of one name begin on one machine, one after the other.
    """
    host = socket.gethostname()
    if name := os.environ.get(PROCESS_VARIABLE, ""):
        return f"{host}-{name}", time.time_ns() // 1000
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}", 0


def build(config: GRPOConfig, context: ServiceContext) -> Rollout:
    """The service of an experiment file."""
    settings = RolloutSettings.from_experiment(config)
    for key in ("buffer", "reward", "weight_sync"):
        if not getattr(settings, key):
            raise ConfigError(f"endpoints.{key} '': expected host:port")
    return Rollout(settings, context)
