from __future__ import annotations

import asyncio

from tests.unit.areal_weight_sync.coordinator_rig import SERVING, Rig
from tests.unit.areal_weight_sync.weight_sync_fakes import FakeEngine

from areal_weight_sync.limits import Pace


async def test_turn_when_ended_then_the_next_goes_and_ending_twice_frees_one() -> None:
    pace = Pace(1, longest_s=60.0)
    end = await pace.turn()
    waiting = [asyncio.create_task(pace.turn()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    end()
    end()
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False]
    waiting[0].result()()
    (await waiting[1])()


async def test_turn_when_it_is_never_ended_then_it_ends_by_itself() -> None:
    pace = Pace(1, longest_s=0.02)
    end = await pace.turn()
    async with asyncio.timeout(60):
        (await pace.turn())()
    end()  # late: frees nothing
    await pace.turn()
    waiting = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    assert not waiting.done()
    await waiting


class Counted(FakeEngine):
    """Counts how many servers are being paused at once."""

    now = most = 0

    async def pause(self, mode: str) -> None:
        Counted.now += 1
        Counted.most = max(Counted.most, Counted.now)
        await asyncio.sleep(0.001)
        Counted.now -= 1
        await super().pause(mode)


class Hanging(FakeEngine):
    """Accepts a pause and never answers."""

    async def pause(self, mode: str) -> None:
        await asyncio.Event().wait()


async def test_update_when_hundreds_of_servers_and_some_hang_then_paused_few_at_a_time(
    tmp_path,
) -> None:
    rig = Rig(tmp_path, probe_interval_s=30.0, update_timeout_s=60.0)
    names = [f"s{index}" for index in range(200)]
    for name in names:
        rig.engines[name] = Counted()
    await rig.publish_model()
    rig.register(*names)
    await rig.until(lambda: rig.coordinator.status().confirmed_servers == 200, "version 0", 60)
    for name in names[:40]:  # more than there are turns
        rig.engines[name].pause = Hanging().pause
    Counted.most = 0
    await rig.publish(1)
    await rig.until(lambda: rig.coordinator.status().confirmed_servers == 160, "the others", 60)
    assert Counted.most <= 32
    assert all(rig.server(name).state is SERVING for name in names[40:])
    for task in rig.tasks:
        task.cancel()
    await asyncio.gather(*rig.tasks, return_exceptions=True)
