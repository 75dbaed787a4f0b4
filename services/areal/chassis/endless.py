"""Loops that run until they are cancelled; any other end is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def keep(
    coroutine: Coroutine[Any, Any, Any], name: str, tell: Callable[[BaseException], None]
) -> asyncio.Task[Any]:
    """Starts a loop as a task.

    Args:
        coroutine: Runs until it is cancelled.
        name: The task's name, also used in the report.
        tell: Called when the loop raises, or returns without having been cancelled.
    """

    def ended(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        # Some libraries swallow a cancellation; the loop then returns because of it.
        if error is None and not task.cancelling():
            error = RuntimeError(f"{name} returned: expected it to run until cancelled")
        if error is not None:
            tell(error)

    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(ended)
    return task
