"""A trainer that learns from rows only: steps, metrics and checkpoints, without services."""

from __future__ import annotations

from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.trainer import BufferTrainer
from areal.clients.weight_sync import WeightSyncClient
from areal_torch.training.session import TrainerSession

_NOWHERE = "127.0.0.1:9"


class OfflineSession(TrainerSession):
    """A `TrainerSession` without ledger, servers and published versions.

    It ends a step like the other session: metrics row, checkpoint, stop request.
    """

    async def _connect(self) -> tuple[BufferTrainer, WeightSyncClient]:
        """Clients that are never called: a channel connects with its first call."""
        return BufferTrainer(BufferConnection(_NOWHERE)), WeightSyncClient(_NOWHERE)

    def _register(self) -> tuple[int, int, bool]:
        self.folder.clean()
        earlier = [each.incarnation for each in self.folder.list()]
        step = self.resumed.step if self.resumed else 0
        return max(earlier, default=0) + 1, step, False

    def _commit(self, step: int) -> None:
        """Does nothing: no ledger counts steps."""

    def _discarded(self, step: int) -> None:
        """Returns nothing: all rows are trained on."""

    def _finish(self) -> None:
        if self.rank == 0:
            self._log.info("finished", step=self.step)
