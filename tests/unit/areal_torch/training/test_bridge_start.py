"""What becomes of the errors of a coroutine that no one waits for."""

from __future__ import annotations

import threading

from structlog.testing import capture_logs

from areal.chassis.waits import Waits
from areal.errors import InvalidInput
from areal_torch.training.bridge import AsyncBridge


def test_coroutine_when_it_fails_unexpectedly_then_logged_and_its_own_errors_not() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def settle() -> None:
        """Runs after the callbacks of what was started before."""

    bridge, ended = AsyncBridge(Waits()), threading.Event()
    try:
        with capture_logs() as logs:
            bridge.start(fail(InvalidInput("said already")))
            bridge.start(fail(ZeroDivisionError("a bug")))
            bridge.call(settle(), "the callbacks", 30.0)
            bridge.loop.call_soon_threadsafe(ended.set)
            assert ended.wait(30.0)
    finally:
        bridge.close()
    assert [(log["event"], log["error"]) for log in logs] == [
        ("background_call_failed", "ZeroDivisionError('a bug')")
    ]
