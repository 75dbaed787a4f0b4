"""Waiting in tests for what nothing announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(
    condition: Callable[[], object],
    what: str = "a condition",
    timeout: float = 60.0,
    state: Callable[[], object] = str,
) -> None:
    """Looks until the condition holds; when time is over, an error with `what` and the state."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} s for {what}; {state()}"
        await asyncio.sleep(0.005)
