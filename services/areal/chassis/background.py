"""Background tasks that cannot die unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from areal.chassis import endless
from areal.chassis.logging import get_logger


class Background:
    """Owns a service's long-running tasks; the first one that fails ends the process.

    A loop that fails silently is a service that looks alive and does nothing; a restarted process
    is visible and starts clean.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log = get_logger(__name__)
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a task that ends; its exception (not its cancellation) sets `failed`."""
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(self._done)
        return self._own(task)

    def keep(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a loop that runs until it is cancelled: its return sets `failed`, too."""
        return self._own(endless.keep(coroutine, name, partial(self._fail, name)))

    def _own(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(task.get_name(), error)

    def _fail(self, name: str, error: BaseException) -> None:
        self._log.error("background_task_failed", task=name, exc_info=error)
        if not self.failed.done():
            self.failed.set_result(error)

    async def cancel(self, deadline_s: float = 5.0) -> None:
        """Cancels all and waits at most `deadline_s` for them to end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_s)
