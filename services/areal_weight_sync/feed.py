"""Who is told what changed: ids, never messages, so a slow reader costs nothing."""

from __future__ import annotations

import asyncio


class Feed:
    """Ids of servers changed since the last read; the empty id stands for the version."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._event = asyncio.Event()

    def put(self, server_id: str) -> None:
        """Marks one as changed."""
        self._ids[server_id] = None
        self._event.set()

    async def take(self, timeout: float | None = None) -> list[str]:
        """Waits for a change; empty when `timeout` seconds passed without one."""
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return []
        self._event.clear()
        ids, self._ids = list(self._ids), {}
        return ids
