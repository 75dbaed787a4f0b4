"""Wires the reward service together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from areal.chassis.service import Registration, Service, ServiceContext
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.recipes import BufferRecipes
from areal.config.experiment import GRPOConfig
from areal.errors import Unavailable
from areal.v1 import reward_service_pb2_grpc as pb_grpc
from areal_reward.children import Children
from areal_reward.config import PoolConfig
from areal_reward.metrics import RewardMetrics
from areal_reward.pool import WorkerPool
from areal_reward.process import WorkerProcess
from areal_reward.recipes import RecipeCache
from areal_reward.servicer import RewardServicer


class RewardService(Service):
    """The pool behind its servicer."""

    def __init__(self, config: GRPOConfig, context: ServiceContext) -> None:
        self._config = PoolConfig.of(config.reward)
        self._context = context
        self._buffer = (
            BufferConnection(config.endpoints.buffer, context.security)
            if config.endpoints.buffer
            else None
        )
        self._children = Children()
        self._pool = WorkerPool(self._config, self._start_worker, RewardMetrics(context.registry))
        self._servicer = RewardServicer(self._pool, RecipeCache(self._get_recipe), context.waits)

    def registrations(self) -> Sequence[Registration]:
        return [
            (
                "areal.v1.RewardService",
                lambda server: pb_grpc.add_RewardServiceServicer_to_server(self._servicer, server),
            )
        ]

    async def start(self) -> None:
        """Starts the workers; returns when all are ready."""
        slots = [
            self._context.background.keep(self._pool.run_slot(), f"reward-slot-{number}")
            for number in range(self._config.workers)
        ]
        ready = asyncio.ensure_future(self._pool.wait_ready())
        # A slot that ends here has failed: the chassis hears of it through `background`.
        await asyncio.wait({ready, *slots}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    async def drain(self) -> None:
        await self._pool.drain()

    async def close(self) -> None:
        """Closes the connection; workers end with their slots, and what they started with them."""
        await self._children.close()
        if self._buffer is not None:
            await self._buffer.close()

    async def _start_worker(self) -> WorkerProcess:
        return await WorkerProcess.start(self._config, self._children)

    async def _get_recipe(self, digest: str) -> tuple[str, bytes]:
        if self._buffer is None:
            raise Unavailable("endpoints.buffer '': recipes cannot be fetched without it")
        return await BufferRecipes(self._buffer).get_recipe(digest)


def build(config: GRPOConfig, context: ServiceContext) -> Service:
    """Makes the service; does no I/O."""
    return RewardService(config, context)
