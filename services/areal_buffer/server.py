"""Wires the buffer service: Redis and the sweeper's loops around the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from redis.exceptions import AuthenticationError, RedisError

from areal.chassis.logging import get_logger
from areal.chassis.service import Registration, Server, ServiceContext, run_service
from areal.clients.base import persist
from areal.clients.redis_connection import connect_redis
from areal.errors import CannotStart, Unavailable
from areal.v1.buffer_service_pb2_grpc import add_BufferServiceServicer_to_server
from areal_buffer.config import BufferConfig
from areal_buffer.ledger import Ledger, Wakes
from areal_buffer.metrics import BufferMetrics
from areal_buffer.records import MemoryGauge
from areal_buffer.redis_store import RedisStore
from areal_buffer.servicer import BufferService
from areal_buffer.sessions import SessionStore
from areal_buffer.sweeper import Sweeper

REDIS_WITHIN_S = 300.0
"""Deadline for Redis at the start, in seconds: a new Redis pod may still pull its image or read a
large file."""


class BufferServer(Server):
    """One replica of the buffer."""

    def __init__(self, config: BufferConfig, context: ServiceContext) -> None:
        self._context = context
        self._redis = connect_redis(config.redis_url, password=context.security.redis_password)
        context.closing.push_async_callback(self._redis.aclose)
        wakes, memory = Wakes(), MemoryGauge(config.max_memory_bytes)
        metrics = BufferMetrics(context.registry)
        store = RedisStore(self._redis, config, context.waits)
        ledger = Ledger(store, wakes, memory, context.waits)
        sessions = SessionStore(self._redis, config, memory, context.waits)
        self._service = BufferService(ledger, store, sessions, memory, metrics, config)
        self._sweeper = Sweeper(store, wakes, memory, metrics, config.sweep_interval_ms / 1000)
        context.waits.watch(self._sweeper.waits)

    def registrations(self) -> Sequence[Registration]:
        add = partial(add_BufferServiceServicer_to_server, self._service)
        return [("areal.v1.BufferService", add)]

    async def start(self) -> None:
        """Starts the server once Redis has answered; fails if it does not within REDIS_WITHIN_S."""
        with self._context.waits.on("answer", "redis"):
            await persist(self._first_sample, REDIS_WITHIN_S)
        keep = self._context.background.keep
        keep(self._sweeper.sweep_forever(), "sweep")
        keep(self._sweeper.sample_forever(), "sample")
        keep(self._sweeper.listen_forever(self._redis), "listen")

    async def _first_sample(self) -> None:
        try:
            await self._redis.ping()
        except AuthenticationError as error:  # waiting does not mend it
            raise CannotStart(f"Redis refuses the password: {error}") from None
        except RedisError:
            pass  # the next call says what it is
        try:
            await self._sweeper.sample()
        except Unavailable as error:
            get_logger(__name__).warning("redis_unreachable", error=str(error))
            raise


def main() -> None:
    """Serves until told to stop."""
    run_service("buffer", BufferConfig.from_experiment, BufferServer)
