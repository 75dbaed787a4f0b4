"""Wiring of the buffer service."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from areal.chassis.service import Registration, Service, ServiceContext
from areal.clients.stores import connect_redis
from areal.config.experiment import GRPOConfig
from areal.v1 import buffer_service_pb2
from areal.v1.buffer_service_pb2_grpc import add_BufferServiceServicer_to_server
from areal_buffer.config import LedgerConfig
from areal_buffer.ledger import Ledger
from areal_buffer.memory import MemoryGauge
from areal_buffer.metrics import BufferMetrics
from areal_buffer.redis_store import RedisStore
from areal_buffer.servicer import BufferServicer
from areal_buffer.sweeper import Sweeper
from areal_buffer.wakes import Wakes


class BufferService(Service):
    """The ledger's process."""

    def __init__(self, config: LedgerConfig, context: ServiceContext) -> None:
        self._context = context
        self._redis = connect_redis(config.redis_url, password=context.security.redis_password)
        wakes, memory = Wakes(), MemoryGauge(config.max_memory_bytes)
        metrics = BufferMetrics(context.registry)
        store = RedisStore(self._redis, config, context.waits)
        ledger = Ledger(store, wakes, memory, context.waits)
        self._servicer = BufferServicer(ledger, store, memory, metrics, config)
        self._sweeper = Sweeper(store, wakes, memory, metrics, config.sweep_interval_ms / 1000)
        context.waits.watch(self._sweeper.waits)

    def registrations(self) -> Sequence[Registration]:
        def add(server: grpc.aio.Server) -> None:
            add_BufferServiceServicer_to_server(self._servicer, server)

        return [(buffer_service_pb2.DESCRIPTOR.services_by_name["BufferService"].full_name, add)]

    async def start(self) -> None:
        """Ready once Redis has answered; gives up when it does not within seconds."""
        await self._sweeper.sample()
        keep = self._context.background.keep
        keep(self._sweeper.sweep_forever(), "sweep")
        keep(self._sweeper.sample_forever(), "sample")
        keep(self._sweeper.listen_forever(self._redis), "listen")

    async def close(self) -> None:
        await self._redis.aclose()


def build(config: GRPOConfig, context: ServiceContext) -> Service:
    """Makes the service; no I/O."""
    return BufferService(LedgerConfig.from_experiment(config), context)
