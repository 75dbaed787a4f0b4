"""The waiting calls over a hand-written store: no Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from areal.errors import ArealError, LeaseLost
from areal.observability.waits import Waits
from areal_buffer.ledger import Ledger
from areal_buffer.memory import MemoryGauge
from areal_buffer.records import FinishedGroup, StoredLease, Take
from areal_buffer.wakes import Kind, Wakes


class FakeStore:
    """Answers `waiting` until told otherwise; counts how often it was asked."""

    def __init__(self) -> None:
        self.looks = 0
        self.ready = False
        self.full: list[bool] = []
        self.near_limit: list[bool] = []

    async def lease(
        self, worker_id: str, max_tasks: int, boot: int
    ) -> tuple[list[StoredLease], str]:
        self.looks += 1
        if not self.ready:
            return [], "queue empty"
        return [StoredLease("a", b"", 1, 0, b"", ())], ""

    async def take(
        self,
        incarnation: int,
        step: int,
        task_ids: Sequence[str],
        *,
        near_limit: bool,
        with_groups: bool,
    ) -> Take:
        self.looks += 1
        self.near_limit.append(near_limit)
        state = "taken" if self.ready else "waiting"
        return Take(state, "1 of 2", False, 0, 0, 0, (), ())

    async def ended(self, task_ids: Sequence[str]) -> list[str]:
        self.looks += 1
        return list(task_ids) if self.ready else []

    async def complete(
        self, groups: Sequence[FinishedGroup], *, full: Sequence[bool]
    ) -> list[bool | ArealError]:
        self.full += full
        return [LeaseLost("a") if group.task_id == "lost" else True for group in groups]


def make_ledger(
    limit: int = 1000, waits: Waits | None = None
) -> tuple[Ledger, FakeStore, Wakes, MemoryGauge]:
    store, wakes, memory = FakeStore(), Wakes(), MemoryGauge(limit)
    return Ledger(store, wakes, memory, waits or Waits()), store, wakes, memory


async def test_wait_when_found_at_once_then_looks_once() -> None:
    ledger, store, _, _ = make_ledger()
    store.ready = True
    leases, reason = await ledger.lease_tasks("w", 1, 10)
    assert (len(leases), reason, store.looks) == (1, "", 1)


async def test_wait_when_no_time_is_given_then_looks_once_and_gives_the_reason() -> None:
    ledger, store, _, _ = make_ledger()
    assert await ledger.lease_tasks("w", 1, 0) == ([], "queue empty")
    assert store.looks == 1


async def test_wait_when_woken_then_looks_again_at_once() -> None:
    ledger, store, wakes, _ = make_ledger()
    waiting = asyncio.create_task(ledger.take_batch(1, 1, (), 10))
    await asyncio.sleep(0.05)
    assert store.looks == 1
    wakes.notify(Kind.LEASE)  # somebody else's
    await asyncio.sleep(0.05)
    assert store.looks == 1
    store.ready = True
    start = time.monotonic()
    wakes.notify(Kind.TAKE)
    assert (await waiting).state == "taken"
    assert time.monotonic() - start < 0.2


async def test_wait_when_the_wake_up_comes_during_the_look_then_it_is_not_missed() -> None:
    ledger, store, wakes, _ = make_ledger()
    look = store.ended

    async def look_and_change(task_ids: Sequence[str]) -> list[str]:
        found = await look(task_ids)
        if not store.ready:
            store.ready = True
            wakes.notify(Kind.ENDED)
        return found

    store.ended = look_and_change  # type: ignore[method-assign]
    start = time.monotonic()
    assert await ledger.wait_tasks(["a"], 10) == ["a"]
    assert time.monotonic() - start < 0.5


async def test_wait_when_wake_ups_stream_in_then_looks_are_spaced() -> None:
    ledger, store, wakes, _ = make_ledger()
    waiting = asyncio.create_task(ledger.take_batch(1, 1, (), 0.3))
    for _ in range(300):
        wakes.notify(Kind.TAKE)
        await asyncio.sleep(0.001)
    assert (await waiting).state == "waiting"
    assert store.looks <= 0.3 / 0.005 + 2


async def test_wait_when_the_wake_up_is_lost_then_the_fallback_finds_it() -> None:
    ledger, store, _, _ = make_ledger()
    waiting = asyncio.create_task(ledger.wait_tasks(["a"], 10))
    await asyncio.sleep(0.01)
    store.ready = True
    assert await asyncio.wait_for(waiting, 2) == ["a"]


async def test_lease_when_many_workers_wait_then_a_wake_up_costs_no_look_each() -> None:
    ledger, store, wakes, _ = make_ledger()
    waiting = [asyncio.create_task(ledger.lease_tasks(f"w{i}", 1, 0.5)) for i in range(20)]
    await asyncio.sleep(0.05)
    assert store.looks == 20
    for number in range(1, 4):
        wakes.notify(Kind.LEASE)
        await asyncio.sleep(0.05)
        assert store.looks == 20 + number
    store.ready = True
    wakes.notify(Kind.LEASE)
    results = await asyncio.gather(*waiting)
    assert all(len(leases) == 1 for leases, _ in results)


async def test_lease_when_a_wake_up_comes_during_anothers_empty_look_then_it_is_not_missed() -> (
    None
):
    ledger, store, wakes, _ = make_ledger()
    waiting = [asyncio.create_task(ledger.lease_tasks(f"w{i}", 1, 10)) for i in range(3)]
    await asyncio.sleep(0.05)
    look = store.lease

    async def look_and_change(
        worker_id: str, max_tasks: int, boot: int
    ) -> tuple[list[StoredLease], str]:
        found = await look(worker_id, max_tasks, boot)
        if not store.ready:
            store.ready = True
            wakes.notify(Kind.LEASE)
        return found

    store.lease = look_and_change  # type: ignore[method-assign]
    start = time.monotonic()
    wakes.notify(Kind.LEASE)
    results = await asyncio.gather(*waiting)
    assert all(len(leases) == 1 for leases, _ in results)
    assert time.monotonic() - start < 0.5


async def test_lease_when_the_wake_up_is_lost_then_the_fallback_finds_it() -> None:
    ledger, store, _, _ = make_ledger()
    waiting = [asyncio.create_task(ledger.lease_tasks(f"w{i}", 1, 10)) for i in range(3)]
    await asyncio.sleep(0.05)
    store.ready = True
    results = await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert all(len(leases) == 1 for leases, _ in results)


async def test_oldest_wait_when_several_then_the_first_and_none_after() -> None:
    waits = Waits()
    ledger, _, _, _ = make_ledger(waits=waits)
    first = asyncio.create_task(ledger.lease_tasks("w1", 1, 0.2))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(ledger.take_batch(1, 7, (), 0.2))
    await asyncio.sleep(0.05)
    oldest, newer = waits.oldest()
    assert (oldest.what, oldest.on, oldest.detail) == ("lease", "queue and admission", "worker w1")
    assert 0.05 < oldest.seconds < 0.2
    assert (newer.what, newer.detail) == ("batch", "step 7")
    await first
    assert [wait.what for wait in waits.oldest()] == ["batch"]
    await second
    assert waits.oldest() == []


async def test_memory_when_groups_come_in_then_counted_until_the_next_sample() -> None:
    ledger, store, _, memory = make_ledger(limit=1000)
    group = FinishedGroup("a", 1, b"x" * 600, 0, (3,), 2, 1.0)
    await ledger.complete_tasks([group])
    await ledger.complete_tasks([group])
    await ledger.complete_tasks([group])
    assert store.full == [False, False, True]
    memory.sample(0)
    assert await ledger.complete_tasks([group, group, group]) == [True, True, True]
    assert store.full[3:] == [False, False, True]
    memory.sample(0)
    (refused,) = await ledger.complete_tasks([replace(group, task_id="lost")])
    assert isinstance(refused, LeaseLost)
    assert memory.used_bytes == 0
    memory.sample(1200)
    assert memory.near_limit
    memory.sample(910)
    assert (memory.near_limit, memory.full) == (True, False)
    await ledger.take_batch(1, 1, (), 0)
    memory.sample(100)
    await ledger.take_batch(1, 1, (), 0)
    assert store.near_limit == [True, False]
