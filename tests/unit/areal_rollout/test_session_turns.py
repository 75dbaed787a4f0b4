"""One session's calls wait for each other, and no other session's for them."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.waiting import until

from areal.errors import CapacityExceeded
from areal_rollout.session_turns import SessionTurns


class Model:
    """Answers when told to; keeps how many answers are under way."""

    def __init__(self, at_once: int = 4) -> None:
        self.turns = SessionTurns(at_once)
        self.under_way: dict[str, int] = {}
        self.order: list[str] = []
        self.most = 0
        self.go = asyncio.Event()

    async def call(
        self, session: str, answers: int = 1, name: str = "", wait_s: float = 60
    ) -> None:
        async with self.turns.turn(session, answers, wait_s):
            self.order.append(name or session)
            self.under_way[session] = self.under_way.get(session, 0) + answers
            self.most = max(self.most, self.under_way[session])
            try:
                await self.go.wait()
            finally:
                self.under_way[session] -= answers


async def test_calls_when_one_session_has_many_then_another_ones_is_not_behind_them() -> None:
    model = Model()
    many = [asyncio.create_task(model.call("many", name=str(n))) for n in range(64)]
    await until(lambda: len(model.order) == 4, "the first calls", 60.0)
    other = asyncio.create_task(model.call("other"))
    await until(lambda: model.order[-1] == "other", "the other session's call", 60.0)
    model.go.set()
    await asyncio.gather(*many, other)
    assert model.most == 4
    assert [name for name in model.order if name != "other"] == [str(n) for n in range(64)]
    assert (model.turns._taken, model.turns._waiting) == ({}, {})


async def test_call_when_it_asks_for_more_answers_than_fit_then_it_goes_alone() -> None:
    model = Model()
    one, large, late = (asyncio.create_task(model.call("s", n)) for n in (1, 128, 1))
    await until(lambda: model.order == ["s"], "the first call", 60.0)
    await asyncio.sleep(0)
    assert model.order == ["s"]  # the small one behind it does not overtake
    model.go.set()
    await asyncio.gather(one, large, late)
    assert model.order == ["s"] * 3
    assert model.turns._taken == {}


async def test_call_when_there_is_no_room_for_long_then_refused_and_the_next_is_served() -> None:
    model = Model(1)
    first = asyncio.create_task(model.call("s"))
    await until(lambda: model.order == ["s"], "the first call", 60.0)
    with pytest.raises(CapacityExceeded, match="1 answers under way") as caught:
        await model.call("s", wait_s=0.01)
    assert caught.value.retry_after_s == 5
    model.go.set()
    await first
    await model.call("s")
    assert (model.turns._taken, model.turns._waiting) == ({}, {})


@pytest.mark.parametrize("seed", range(20))
async def test_turns_when_calls_are_cancelled_at_any_time_then_no_room_is_lost(seed: int) -> None:
    chance, model = random.Random(seed), Model()
    model.go.set()
    tasks = [
        asyncio.create_task(model.call(chance.choice("ab"), chance.randint(1, 6)))
        for _ in range(60)
    ]
    for _ in range(30):
        await asyncio.sleep(0)
        chance.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(each) for each in results} <= {type(None), asyncio.CancelledError}
    assert (model.turns._taken, model.turns._waiting) == ({}, {})
