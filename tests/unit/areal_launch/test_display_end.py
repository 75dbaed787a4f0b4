"""Every display shows until it is cancelled, also one that shows nothing."""

from __future__ import annotations

import asyncio

from areal.chassis import endless
from areal_launch.view.display import Display


async def test_display_when_it_shows_nothing_then_it_runs_until_cancelled() -> None:
    told: list[BaseException] = []
    task = endless.keep(Display().run(), "display", told.append)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert told == []
