"""Who pulls a version from whom."""

from __future__ import annotations

import asyncio

import pytest

from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.engine.givers import Givers


async def pull(givers: Givers, taker: str, seen: list[str], *, name: str = "v1") -> None:
    async with givers.turn(name, timeout=30.0) as turn:
        seen.append(turn.giver)
        await asyncio.sleep(0.001)
        turn.taker = taker


async def test_version_when_16_want_it_then_the_store_gives_once_and_each_giver_one_at_a_time() -> (
    None
):
    givers, busy, seen = Givers(), set[str](), list[str]()

    async def take(taker: str) -> None:
        async with givers.turn("v1", timeout=30.0) as turn:
            assert turn.giver not in busy
            busy.add(turn.giver)
            seen.append(turn.giver)
            await asyncio.sleep(0.001)
            busy.discard(turn.giver)
            turn.taker = taker

    await asyncio.gather(*(take(f"s{n}") for n in range(16)))
    assert seen.count("") == 1
    assert len(seen) == 16
    # A tree, not a chain: no one gave more often than there are rounds.
    assert max(seen.count(giver) for giver in seen) <= 4
    await pull(givers, "newcomer", seen)
    assert seen[-1] != ""


async def test_giver_when_a_transfer_from_it_fails_then_not_asked_again() -> None:
    givers, seen = Givers(), list[str]()
    await pull(givers, "a", seen)

    async def refuse() -> None:
        async with givers.turn("v1", timeout=30.0) as turn:
            assert turn.giver == "a"
            raise EngineError(Fault.UPDATE_REFUSED, "digest")

    with pytest.raises(EngineError):
        await refuse()
    assert not givers.holds("v1", "a")
    await pull(givers, "b", seen)
    await pull(givers, "c", seen)
    assert seen == ["", "", "b"]


async def test_store_when_it_fails_the_first_then_the_next_asks_it() -> None:
    givers, seen = Givers(), list[str]()
    entered = asyncio.Event()

    async def fail() -> None:
        async with givers.turn("v1", timeout=30.0):
            entered.set()
            await asyncio.sleep(0.01)
            raise EngineError(Fault.UPDATE_REFUSED, "the store is away")

    first = asyncio.create_task(fail())
    await entered.wait()
    await pull(givers, "b", seen)
    with pytest.raises(EngineError):
        await first
    assert seen == [""]


async def test_turn_when_it_does_not_come_in_time_then_the_store_gives() -> None:
    givers = Givers()
    async with givers.turn("v1", timeout=30.0), givers.turn("v1", timeout=0.01) as late:
        assert late.giver == ""


async def test_transfer_when_it_is_cancelled_then_its_giver_gives_to_the_next() -> None:
    givers, seen = Givers(), list[str]()
    await pull(givers, "a", seen)
    entered = asyncio.Event()

    async def hang() -> None:
        async with givers.turn("v1", timeout=30.0):
            entered.set()
            await asyncio.Event().wait()

    hanging = asyncio.create_task(hang())
    await entered.wait()
    hanging.cancel()
    await asyncio.wait({hanging})
    await pull(givers, "b", seen)
    assert seen == ["", "a"]


async def test_versions_when_a_third_comes_then_the_oldest_is_forgotten() -> None:
    givers, seen = Givers(), list[str]()
    for name in ("v1", "v2", "v3"):
        await pull(givers, "a", seen, name=name)
    assert seen == ["", "", ""]
    assert not givers.holds("v1", "a")
    assert givers.holds("v2", "a")
    assert givers.holds("v3", "a")


@pytest.mark.parametrize("fault", [Fault.UNREACHABLE, Fault.GARBAGE])
async def test_giver_when_the_taker_itself_fails_then_asked_again(fault: Fault) -> None:
    givers, seen = Givers(), list[str]()
    await pull(givers, "a", seen)

    async def die() -> None:
        async with givers.turn("v1", timeout=30.0):
            raise EngineError(fault, "the taker is gone")

    with pytest.raises(EngineError):
        await die()
    assert givers.holds("v1", "a")
    await pull(givers, "b", seen)
    assert seen == ["", "a"]
