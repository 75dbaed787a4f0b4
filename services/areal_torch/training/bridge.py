"""Calls async clients from the trainer's synchronous code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from areal.chassis.logging import get_logger
from areal.chassis.waits import Waits
from areal.errors import ArealError, WaitTimeout

T = TypeVar("T")

RETRY_S = 120.0
"""A service may be away for this many seconds (restart, outage of Redis) before the trainer ends
with an error."""
CALL_S = RETRY_S + 30.0
"""A call's deadline: its last try may begin when the time for retries ends."""


class AsyncBridge:
    """One event loop in one daemon thread; gRPC channels live there.

    The trainer's main thread computes; all network calls run here, so a long computation never
    delays keep-alives, status requests or checkpoint commits.
    """

    def __init__(self, waits: Waits) -> None:
        """Starts the thread; `waits` names each call while it lasts."""
        self._waits = waits
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="areal-bridge", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(
        self,
        coroutine: Coroutine[Any, Any, T],
        what: str,
        timeout: float = CALL_S,
        *,
        on: str = "this process",
    ) -> T:
        """Runs a coroutine and waits for its result.

        Raises:
            WaitTimeout: After `timeout` seconds, naming `what` and `on`; the coroutine is
                cancelled.
        """
        since = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            with self._waits.on("call", on, what):
                return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():  # the coroutine's own TimeoutError
                raise
            future.cancel()
            raise WaitTimeout(what, on=on, since=since) from None

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine in the background; it handles its expected errors itself."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).add_done_callback(_log_unexpected)

    def close(self) -> None:
        """Stops the loop; pending coroutines are cancelled."""

        async def cancel_all() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.call(cancel_all(), "bridge shutdown", 5.0)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5.0)
            if not self._thread.is_alive():
                self.loop.close()


def _log_unexpected(future: concurrent.futures.Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, ArealError):
        get_logger(__name__).error("background_call_failed", error=repr(error)[:500])
