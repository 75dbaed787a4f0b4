"""The loops that ask other services and tell the run's status."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from tests.waiting import until

from areal.clients.trainer import TrainerStatus
from areal.errors import Unavailable
from areal.weights.servers import InferenceServer, ServerState
from areal_gateway import pollers
from areal_gateway.config import GatewayConfig
from areal_gateway.status import RunStatus

CONFIG = GatewayConfig(interval_s=0.01, trainer_wait_s=7.0)


def make_status() -> RunStatus:
    return RunStatus({}, history=10, max_rows=100)


@asynccontextmanager
async def running(loop: Any) -> Any:
    task = asyncio.create_task(loop)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class WeightSync:
    """Lists two servers, or is away."""

    away = False

    async def list_servers(self) -> tuple[list[InferenceServer], str]:
        if self.away:
            raise Unavailable("weight-sync is away")
        return [InferenceServer(n, f"http://{n}", ServerState.SERVING, 3) for n in "ba"], ""


async def test_servers_when_weight_sync_is_away_then_the_last_list_stays_and_why() -> None:
    run, sync = make_status(), WeightSync()
    async with running(pollers.watch_clock(run, None, sync, CONFIG)):  # type: ignore[arg-type]
        await until(lambda: run.status()["sources"]["servers"]["ok"])
        sync.away = True
        await until(lambda: not run.status()["sources"]["servers"]["ok"])
        assert run.status()["sources"]["servers"]["error"] == "weight-sync is away"
        assert [server["server_id"] for server in run.status()["servers"]] == ["a", "b"]
        sync.away = False
        await until(lambda: run.status()["sources"]["servers"]["ok"])


class Trainer:
    """Answers from a list, then with the last; notes what it is asked."""

    def __init__(self, *answers: TrainerStatus | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, float]] = []

    async def get_status(self, after_step: int = 0, max_wait_s: float = 0.0) -> TrainerStatus:
        self.asked.append((after_step, max_wait_s))
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def status(state: str, step: int, rows: list[int], incarnation: int = 1) -> TrainerStatus:
    return TrainerStatus(state, step, 9, incarnation, 1, "", [{"step": each} for each in rows])


def steps(run: RunStatus) -> list[int]:
    return [row["step"] for row in run.rows_after(0)]


async def test_trainer_when_it_trains_then_asked_at_once_and_then_by_long_polls() -> None:
    run = make_status()
    trainer = Trainer(status("training", 2, [1, 2]), status("training", 3, [3]))
    async with running(pollers.watch_trainer(run, trainer, CONFIG)):  # type: ignore[arg-type]
        await until(lambda: len(trainer.asked) >= 3)
    assert trainer.asked[:3] == [(0, 0.0), (2, 7.0), (3, 7.0)]


async def test_trainer_when_it_is_over_then_its_last_rows_are_read_and_no_long_poll_spins(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(pollers, "_OVER_S", 3600.0)
    for state in ("finished", "failed"):
        run = make_status()
        trainer = Trainer(status(state, 2, [1, 2]), status(state, 2, []))
        async with running(pollers.watch_trainer(run, trainer, CONFIG)):  # type: ignore[arg-type]
            await until(lambda: len(trainer.asked) == 2)  # noqa: B023
            for _ in range(20):
                await asyncio.sleep(0)
        assert trainer.asked == [(0, 0.0), (2, 0.0)], state
        assert steps(run) == [1, 2]


async def test_trainer_when_another_life_begins_then_rows_beyond_its_checkpoint_go() -> None:
    run = make_status()
    trainer = Trainer(
        status("training", 5, [1, 2, 3, 4, 5]),
        Unavailable("it restarts"),
        status("starting", 3, [], incarnation=2),  # after row 5 there is none
        status("starting", 3, [1, 2, 3], incarnation=2),  # asked again from the beginning
        status("training", 4, [4], incarnation=2),
    )
    async with running(pollers.watch_trainer(run, trainer, CONFIG)):  # type: ignore[arg-type]
        await until(lambda: len(trainer.asked) >= 6)
    assert trainer.asked[:6] == [(0, 0.0), (5, 7.0), (5, 0.0), (0, 0.0), (3, 7.0), (4, 7.0)]
    assert steps(run) == [1, 2, 3, 4]
