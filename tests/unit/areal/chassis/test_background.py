"""Background tasks that fail, or loops that end, end the process."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from areal.chassis.background import Background


async def fails() -> None:
    raise OSError("the disk is gone")


async def returns() -> None:
    return None


async def test_spawn_when_a_task_raises_then_the_process_is_told() -> None:
    background = Background()
    background.spawn(fails(), "one")
    with pytest.raises(OSError, match="the disk is gone"):
        raise await asyncio.wait_for(background.failed, 60)


async def test_keep_when_a_loop_returns_then_the_process_is_told() -> None:
    background = Background()
    background.spawn(returns(), "task")
    background.keep(returns(), "sweep")
    error = await asyncio.wait_for(background.failed, 60)
    assert str(error) == "sweep returned: expected it to run until cancelled"


async def test_keep_when_a_loop_swallows_its_cancellation_then_nothing_is_told() -> None:
    async def swallows() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    background = Background()
    task = background.keep(swallows(), "announcer")
    await asyncio.sleep(0)
    await background.cancel()
    assert not task.cancelled()
    assert not background.failed.done()


async def test_keep_when_cancelled_then_nothing_is_told() -> None:
    background = Background()
    background.keep(asyncio.Event().wait(), "sweep")
    await asyncio.sleep(0)
    await background.cancel()
    assert not background.failed.done()
