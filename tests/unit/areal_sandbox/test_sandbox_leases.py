"""Leases over boxes that are scripted, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from tests.waiting import until

from areal.errors import CapacityExceeded, InvalidInput, NotFound, Unavailable
from areal.protocol.boxes import Limits, Outcome
from areal_sandbox.config import SandboxConfig
from areal_sandbox.leases import Leases
from areal_sandbox.metrics import SandboxMetrics


class FakeBox:
    """A box that starts at once."""

    def __init__(self) -> None:
        self.running, self.opened, self.commands = False, False, {}

    async def start(self) -> None:
        self.running = True

    async def open(self, limits: Limits) -> None:
        self.opened = True

    async def close(self) -> None:
        self.running = False


class FakeOnce:
    """Programs that end when told."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def run(self, code, **_) -> Outcome:
        await self.gate.wait()
        return Outcome(0, "", code, "", 0.1, 0)

    async def close(self) -> None:
        self.gate.set()


@asynccontextmanager
async def lending(**settings) -> AsyncIterator[tuple[Leases, list[FakeBox], CollectorRegistry]]:
    made: list[FakeBox] = []
    registry = CollectorRegistry()
    tasks: set[asyncio.Task] = set()

    def make() -> FakeBox:
        made.append(FakeBox())
        return made[-1]

    def spawn(coroutine, name) -> None:
        tasks.add(asyncio.create_task(coroutine))

    config = SandboxConfig(**{"boxes": 2, "warm": 1, **settings})
    leases = Leases(config, make, FakeOnce(), spawn, SandboxMetrics(registry))
    refill = asyncio.create_task(leases.refill())
    try:
        yield leases, made, registry
    finally:
        refill.cancel()
        await leases.drain()
        await leases.close()
        await asyncio.gather(*tasks)
        assert not any(box.running for box in made)


async def test_create_when_a_box_is_warm_then_it_is_lent_and_replaced() -> None:
    async with lending() as (leases, made, _):
        await until(lambda: made and made[0].running)
        lease = await leases.create(Limits())
        assert lease.box is made[0]
        assert made[0].opened
        await until(lambda: len(made) == 2)  # another is warm
        assert (await leases.create(Limits())).box is made[1]


async def test_create_when_all_are_lent_then_refused_with_a_time_to_try_again() -> None:
    async with lending() as (leases, _, registry):
        first, _ = await leases.create(Limits(), 7.0), await leases.create(Limits(), 100.0)
        with pytest.raises(CapacityExceeded, match="all 2 boxes are lent") as refused:
            await leases.create(Limits())
        assert refused.value.retry_after_s == 7
        assert registry.get_sample_value("areal_sandbox_refused_total") == 1
        await leases.kill(first.id)
        await leases.create(Limits())


async def test_create_when_a_box_still_starts_then_it_counts_as_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()

    async def start(box: FakeBox) -> None:
        await gate.wait()
        box.running = True

    monkeypatch.setattr(FakeBox, "start", start)
    async with lending(boxes=1, warm=0) as (leases, made, _):
        first = asyncio.create_task(leases.create(Limits()))
        await until(lambda: len(made) == 1)
        second = asyncio.create_task(leases.create(Limits()))
        await until(lambda: second.done() or len(made) == 2)
        gate.set()
        with pytest.raises(CapacityExceeded):
            await second
        assert (await first).box is made[0]


async def test_lease_when_its_time_is_over_then_its_box_is_destroyed() -> None:
    async with lending() as (leases, _, registry):
        lease = await leases.create(Limits(), 0.05)
        await until(lambda: not lease.box.running)
        with pytest.raises(NotFound, match="no such box"):
            leases.get(lease.id)
        labels = {"cause": "expired"}
        assert registry.get_sample_value("areal_sandbox_leases_ended_total", labels) == 1


async def test_lease_when_kept_then_its_end_is_later() -> None:
    async with lending() as (leases, _, _):
        lease = await leases.create(Limits(), 0.2)
        leases.keep(lease.id, 60.0)
        await asyncio.sleep(0.3)  # past the first deadline: nothing may happen then
        assert leases.get(lease.id) is lease
        with pytest.raises(InvalidInput, match="ttl 90000 s: expected"):
            leases.keep(lease.id, 90_000.0)


async def test_lease_when_its_box_died_then_it_is_gone_and_its_place_is_free() -> None:
    async with lending(boxes=1) as (leases, _, registry):
        lease = await leases.create(Limits())
        lease.box.running = False
        with pytest.raises(NotFound):
            leases.get(lease.id)
        labels = {"cause": "died"}
        await until(
            lambda: registry.get_sample_value("areal_sandbox_leases_ended_total", labels) == 1
        )
        assert (await leases.create(Limits())).id != lease.id


async def test_commands_when_too_many_wait_then_refused() -> None:
    async with lending(max_waiting=1) as (leases, _, _):
        waiting = asyncio.create_task(leases.once("1", [], {}, "", Limits()))
        await asyncio.sleep(0)
        with pytest.raises(CapacityExceeded, match="try again in 1 s"):
            await leases.once("2", [], {}, "", Limits())
        leases._once.gate.set()
        assert (await waiting).stdout == "1"


async def test_drain_when_boxes_are_lent_then_all_end_and_no_more_are_lent() -> None:
    async with lending() as (leases, _, _):
        lease = await leases.create(Limits())
        await leases.drain()
        assert not lease.box.running
        for call in (leases.create(Limits()), leases.once("1", [], {}, "", Limits())):
            with pytest.raises(Unavailable, match="shutting down"):
                await call
