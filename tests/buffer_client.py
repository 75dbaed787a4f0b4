"""A test submits, works, trains and looks, all over one connection."""

from __future__ import annotations

from areal.clients.buffer.admin import BufferAdmin
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.tasks import BufferRecipes, BufferTasks
from areal.clients.buffer.trainer import BufferTrainer
from areal.clients.buffer.worker import BufferWorker
from areal.security import Security


class BufferClient(BufferTasks, BufferWorker, BufferTrainer, BufferRecipes, BufferAdmin):
    """Every role."""

    def __init__(
        self, address: str, security: Security | None = None, **options: float | None
    ) -> None:
        super().__init__(BufferConnection(address, security, **options))

    async def close(self) -> None:
        await super().close()
        await self.connection.close()
