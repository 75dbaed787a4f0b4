"""What a worker asks for again and again: not too often, and only of its own time."""

from __future__ import annotations

import asyncio
import time

from tests.waiting import until

from areal.clients.trainer import TrainerStatus
from areal.weights.servers import ServerChanges
from areal_rollout.generation.server_table import ServerTable
from areal_rollout.load_watch import LoadWatch
from areal_rollout.server_refresh import ServerRefresh


class Trainer:
    """A trainer that has trained for long when it is first asked."""

    def __init__(self, *rows: list[dict[str, float]]) -> None:
        self._rows, self._step = list(rows), 0

    async def get_status(self, after_step: int = 0, max_wait_s: float = 0.0) -> TrainerStatus:
        rows = self._rows.pop(0)
        self._step += len(rows)
        return TrainerStatus("training", self._step, 100, 1, 1, "", rows)


async def test_load_when_the_trainer_has_trained_before_then_only_steps_since_count() -> None:
    step = {"time/step": 3.0, "time/wait": 1.0}
    watch = LoadWatch(
        Trainer([step] * 50, [step] * 2),
        servers=lambda: 1,
        generating_s=lambda: 0.0,
        report=lambda *_: None,
    )
    await watch.read_rows()
    assert (watch._trained_s, watch._training_s) == (0.0, 0.0)
    await watch.read_rows()
    assert (watch._trained_s, watch._training_s) == (6.0, 4.0)


async def test_refresh_when_announced_without_end_then_it_rests_in_between() -> None:
    asked = 0

    async def list_changes(as_of: str) -> ServerChanges:
        nonlocal asked
        asked += 1
        refresh.announce()  # something changes again while it is told
        await asyncio.sleep(0.03)
        refresh.announce()
        return ServerChanges((), as_of="x")

    refresh = ServerRefresh(ServerTable(), list_changes)
    began = time.monotonic()
    following = asyncio.create_task(refresh.follow())
    try:
        await until(lambda: asked == 5)
        # Four whole listings, and four times as long after each of them.
        assert time.monotonic() - began >= 4 * 5 * 0.03
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
