"""Wires the reward service: worker processes and the recipes they load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from areal.chassis.service import Registration, Server, ServiceContext, run_service
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.tasks import BufferRecipes
from areal.errors import Unavailable
from areal.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from areal_reward.children import Children
from areal_reward.config import RewardConfig
from areal_reward.metrics import RewardMetrics
from areal_reward.pool import WorkerPool
from areal_reward.process import WorkerProcess
from areal_reward.recipes import RecipeCache
from areal_reward.servicer import RewardService


class RewardServer(Server):
    """The process of the reward service, with its pool of workers."""

    def __init__(self, config: RewardConfig, context: ServiceContext) -> None:
        self._config = config
        self._context = context
        self._buffer = (
            context.own(BufferConnection(config.buffer, context.security))
            if config.buffer
            else None
        )
        # Workers end with their slots; this ends what they started with them.
        children = context.own(Children())
        start = partial(WorkerProcess.start, config, children)
        self._pool = WorkerPool(config, start, RewardMetrics(context.registry))
        self._service = RewardService(self._pool, RecipeCache(self._get_recipe), context.waits)

    def registrations(self) -> Sequence[Registration]:
        add = partial(add_RewardServiceServicer_to_server, self._service)
        return [("areal.v1.RewardService", add)]

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

    async def _get_recipe(self, digest: str) -> tuple[str, bytes]:
        if self._buffer is None:
            raise Unavailable("endpoints.buffer '': recipes cannot be fetched without it")
        return await BufferRecipes(self._buffer).get_recipe(digest)


def main() -> None:
    """Serves until told to stop."""
    run_service("reward", RewardConfig.from_experiment, RewardServer)
