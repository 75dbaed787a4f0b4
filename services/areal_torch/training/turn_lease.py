"""The trainer's turn on shared GPUs, as weight-sync sees it: a lease that is renewed (rank 0).

    released ── sleep ──> held ──> renewed every RENEW_S ──> …
        ^                  │
        └───── wake ───────┘       weight-sync ends a turn that was not renewed for LEASE_S

One call at a time: a renewal must not arrive after the release.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal.chassis.logging import get_logger
from areal.clients.weight_sync import WeightSyncClient
from areal.errors import ArealError, StaleIncarnation
from areal_torch.training.bridge import CALL_S, AsyncBridge

LEASE_S = 15.0
RENEW_S = 5.0


class TurnLease:
    """Asks weight-sync; `sleep` and `wake` block, the renewals are made in the bridge's loop."""

    def __init__(
        self, bridge: AsyncBridge, client: WeightSyncClient, incarnation: Callable[[], int]
    ) -> None:
        """Makes no call yet.

        Args:
            bridge: Its loop makes the calls.
            client: Of weight-sync.
            incarnation: Returns the trainer's; an older one than weight-sync knows is refused.
        """
        self._bridge = bridge
        self._client = client
        self._incarnation = incarnation
        self._calls = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        self._log = get_logger(__name__)

    def sleep(self) -> list[str]:
        """Begins the turn, or keeps it; returns the servers that hold memory some seconds later."""
        what = "servers to release their GPU memory"
        return self._bridge.call(self._begin(), what, CALL_S, on=self._on)

    def wake(self, timeout: float | None = None) -> None:
        """Ends the turn, even one of an earlier incarnation."""
        what = "servers to get their GPUs back"
        self._bridge.call(self._end(), what, CALL_S if timeout is None else timeout, on=self._on)

    @property
    def _on(self) -> str:
        return f"weight-sync {self._client.address}"

    async def _begin(self) -> list[str]:
        async with self._calls:
            awake = await self._client.hold_servers(self._incarnation(), lease_s=LEASE_S)
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._renew(), name="gpu-turn")
        return awake

    async def _end(self) -> None:
        async with self._calls:
            if self._renewing is not None:
                self._renewing.cancel()
                self._renewing = None
            await self._client.hold_servers(self._incarnation(), lease_s=0.0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                async with self._calls:
                    await self._client.hold_servers(self._incarnation(), lease_s=LEASE_S)
            except StaleIncarnation as error:
                self._log.error("turn_lost", cause=str(error))
                return
            except ArealError as error:  # weight-sync restarts, say: servers sleep on meanwhile
                self._log.warning("turn_not_renewed", cause=str(error))
