"""The service's children: its workers, and what workers left behind.

User code can detach a process from its worker (fork twice, setsid, an empty environment). The
kernel hands it to this service, which asks for that, and whatever is no worker is ended as soon as
any worker has ended: no one can tell whose it was.
"""

from __future__ import annotations

import asyncio
from typing import Any

from areal.orphans import adopt_orphans, end_children, reap_strays


class Children:
    """Starts workers and ends the others; one for the whole process."""

    def __init__(self, end_s: float = 5.0) -> None:
        """`end_s` is the time for a killed process to end, in seconds."""
        self._end_s = end_s
        self._started: list[asyncio.subprocess.Process] = []
        # While one is started its pid is not known yet, and it must not be taken for a stray.
        self._starting = asyncio.Lock()

    async def start(self, *argv: str, **options: Any) -> asyncio.subprocess.Process:
        """Starts a worker, as `asyncio.create_subprocess_exec` does."""
        adopt_orphans()
        async with self._starting:
            process = await asyncio.create_subprocess_exec(*argv, **options)
            self._started.append(process)
        return process

    def reap(self) -> None:
        """Reaps strays that have ended by themselves: they would stay as zombies."""
        reap_strays(self._workers())

    async def end_strays(self) -> None:
        """Kills what is no worker; returns once it is gone."""
        async with self._starting:
            await asyncio.to_thread(end_children, self._workers(), self._end_s)

    async def close(self) -> None:
        """Waits for workers that were killed; then nothing that they started is left."""
        ending = [asyncio.ensure_future(worker.wait()) for worker in self._started]
        if ending:
            await asyncio.wait(ending, timeout=self._end_s)
        await self.end_strays()

    def _workers(self) -> frozenset[int]:
        """Returns the pids that asyncio waits for; after that, a pid may belong to any process."""
        self._started = [each for each in self._started if each.returncode is None]
        return frozenset(each.pid for each in self._started)
