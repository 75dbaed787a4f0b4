"""The waiting calls over a hand-written store: no Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from tests.waiting import until

import areal_buffer.ledger
from areal.chassis.waits import Waits
from areal.errors import ArealError, LeaseLost
from areal.protocol.leases import Take, TakeState
from areal.v1 import buffer_service_pb2 as pb
from areal_buffer.ledger import Kind, Ledger, Wakes
from areal_buffer.records import Completion, MemoryGauge

T = TypeVar("T")


class FakeStore:
    """Answers `waiting` until told otherwise; counts how often it was asked."""

    def __init__(self) -> None:
        self.looks = 0
        self.ready = False
        self.limits: list[int] = []
        self.queued = 0

    async def lease(self, worker_id: str, max_tasks: int, boot: int) -> pb.LeaseTasksResponse:
        self.looks += 1
        if not self.ready:
            return pb.LeaseTasksResponse(reason="queue empty")
        return pb.LeaseTasksResponse(leases=[pb.Lease(token=1)])

    async def take(
        self,
        incarnation: int,
        step: int,
        task_ids: Sequence[str],
        *,
        limit: int,
        with_groups: bool,
        refill_below: int,
        confirmed: int | None,
    ) -> Take:
        self.looks += 1
        self.limits.append(limit)
        state = TakeState.TAKEN if self.ready else TakeState.WAITING
        wanted = not self.ready and self.queued < refill_below
        return Take(state, waiting_for="1 of 2", queued=self.queued, rows_wanted=wanted)

    async def ended(self, task_ids: Sequence[str], incarnation: int) -> list[str]:
        self.looks += 1
        return list(task_ids) if self.ready else []

    async def complete(
        self, groups: Sequence[Completion], *, limit: int
    ) -> list[bool | ArealError]:
        self.limits.append(limit)
        return [LeaseLost("a") if group.task_id == "lost" else True for group in groups]


def make_ledger(
    limit: int = 1000, waits: Waits | None = None
) -> tuple[Ledger, FakeStore, Wakes, MemoryGauge]:
    store, wakes, memory = FakeStore(), Wakes(), MemoryGauge(limit)
    return Ledger(store, wakes, memory, waits or Waits()), store, wakes, memory


async def test_wait_when_found_at_once_then_looks_once() -> None:
    ledger, store, _, _ = make_ledger()
    store.ready = True
    found = await ledger.lease_tasks("w", 1, 10)
    assert (len(found.leases), found.reason, store.looks) == (1, "", 1)


async def test_wait_when_no_time_is_given_then_looks_once_and_gives_the_reason() -> None:
    ledger, store, _, _ = make_ledger()
    assert (await ledger.lease_tasks("w", 1, 0)).reason == "queue empty"
    assert store.looks == 1


@pytest.fixture
def only_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second look but after a wake-up: the timer that replaces a lost one is far away."""
    monkeypatch.setattr(areal_buffer.ledger, "_FALLBACK_S", 1000.0)


async def looked(store: FakeStore, times: int) -> None:
    """Returns once the store has been asked so often, and others had time to ask more often."""
    await until(lambda: store.looks >= times, f"{times} looks", state=lambda: f"{store.looks}")
    await asyncio.sleep(0.05)
    assert store.looks == times


async def within(pauses: int, awaited: Awaitable[T]) -> T:
    """The result, after so many pauses of 5 ms at most: load makes them longer, not more."""
    task = asyncio.ensure_future(awaited)
    for _ in range(pauses):
        await asyncio.sleep(0.005)
        if task.done():
            return task.result()
    task.cancel()
    raise AssertionError(f"nothing after {pauses} pauses")


@pytest.mark.usefixtures("only_wakes")
async def test_wait_when_woken_then_looks_again_at_once() -> None:
    ledger, store, wakes, _ = make_ledger()
    waiting = asyncio.create_task(ledger.take_batch(1, 1, (), 30))
    await looked(store, 1)
    wakes.notify(Kind.LEASE)  # somebody else's
    await looked(store, 1)
    store.ready = True
    wakes.notify(Kind.TAKE)
    assert (await within(20, waiting)).state == "taken"
    assert store.looks == 2


@pytest.mark.usefixtures("only_wakes")
async def test_take_when_the_queue_falls_below_the_watermark_then_answers_waiting_at_once() -> None:
    ledger, store, wakes, _ = make_ledger()
    store.queued = 4
    waiting = asyncio.create_task(ledger.take_batch(1, 1, (), 30, refill_below=4))
    await looked(store, 1)
    store.queued = 3
    wakes.notify(Kind.TAKE)
    taken = await within(20, waiting)
    assert (taken.state, taken.queued) == ("waiting", 3)


@pytest.mark.usefixtures("only_wakes")
async def test_wait_when_the_wake_up_comes_during_the_look_then_it_is_not_missed() -> None:
    ledger, store, wakes, _ = make_ledger()
    look = store.ended

    async def look_and_change(task_ids: Sequence[str], incarnation: int) -> list[str]:
        found = await look(task_ids, incarnation)
        if not store.ready:
            store.ready = True
            wakes.notify(Kind.ENDED)
        return found

    store.ended = look_and_change  # type: ignore[method-assign]
    assert await within(20, ledger.wait_tasks(["a"], 30)) == ["a"]
    assert store.looks == 2


@pytest.mark.usefixtures("only_wakes")
async def test_wait_when_wake_ups_stream_in_then_looks_are_spaced() -> None:
    ledger, store, wakes, _ = make_ledger()
    times: list[float] = []
    look = store.take

    async def timed_look(*arguments: Any, **more: Any) -> Take:
        times.append(asyncio.get_running_loop().time())
        wakes.notify(Kind.TAKE)
        store.ready = len(times) == 10
        return await look(*arguments, **more)

    store.take = timed_look  # type: ignore[method-assign]
    taken = await within(200, ledger.take_batch(1, 1, (), 30))
    assert (taken.state, len(times)) == ("taken", 10)
    assert min(later - earlier for earlier, later in pairwise(times)) >= 0.0049


async def test_wait_when_the_wake_up_is_lost_then_the_fallback_finds_it() -> None:
    ledger, store, _, _ = make_ledger()
    waiting = asyncio.create_task(ledger.wait_tasks(["a"], 30))
    await looked(store, 1)
    store.ready = True
    assert await within(400, waiting) == ["a"]


@pytest.mark.usefixtures("only_wakes")
async def test_lease_when_many_workers_wait_then_a_wake_up_costs_no_look_each() -> None:
    ledger, store, wakes, _ = make_ledger()
    waiting = [asyncio.create_task(ledger.lease_tasks(f"w{i}", 1, 30)) for i in range(20)]
    await looked(store, 20)
    for number in range(1, 4):
        wakes.notify(Kind.LEASE)
        await looked(store, 20 + number)
    store.ready = True
    wakes.notify(Kind.LEASE)
    results = await within(20, asyncio.gather(*waiting))
    assert all(len(found.leases) == 1 for found in results)


@pytest.mark.usefixtures("only_wakes")
async def test_lease_when_a_wake_up_comes_during_anothers_empty_look_then_it_is_not_missed() -> (
    None
):
    ledger, store, wakes, _ = make_ledger()
    waiting = [asyncio.create_task(ledger.lease_tasks(f"w{i}", 1, 30)) for i in range(3)]
    await looked(store, 3)
    look = store.lease

    async def look_and_change(worker_id: str, max_tasks: int, boot: int) -> pb.LeaseTasksResponse:
        found = await look(worker_id, max_tasks, boot)
        if not store.ready:
            store.ready = True
            wakes.notify(Kind.LEASE)
        return found

    store.lease = look_and_change  # type: ignore[method-assign]
    wakes.notify(Kind.LEASE)
    results = await within(20, asyncio.gather(*waiting))
    assert all(len(found.leases) == 1 for found in results)


async def test_lease_when_one_has_found_nothing_and_the_wake_up_is_lost_then_it_holds_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(areal_buffer.ledger, "_FALLBACK_S", 0.05)
    ledger, store, _, _ = make_ledger()
    waiting = [asyncio.create_task(ledger.lease_tasks(f"w{i}", 1, 30)) for i in range(3)]
    await until(lambda: store.looks > 3, "a look for all of them")
    store.ready = True
    results = await within(400, asyncio.gather(*waiting))
    assert all(len(found.leases) == 1 for found in results)


async def test_lease_when_the_wake_up_is_lost_then_the_fallback_finds_it() -> None:
    ledger, store, _, _ = make_ledger()
    waiting = [asyncio.create_task(ledger.lease_tasks(f"w{i}", 1, 30)) for i in range(3)]
    await looked(store, 3)
    store.ready = True
    results = await within(400, asyncio.gather(*waiting))
    assert all(len(found.leases) == 1 for found in results)


@pytest.mark.usefixtures("only_wakes")
async def test_oldest_wait_when_several_then_the_first_and_none_after() -> None:
    waits = Waits()
    ledger, store, wakes, _ = make_ledger(waits=waits)
    began = time.monotonic()
    first = asyncio.create_task(ledger.lease_tasks("w1", 1, 30))
    await looked(store, 1)
    second = asyncio.create_task(ledger.take_batch(1, 7, (), 30))
    await looked(store, 2)
    oldest, newer = waits.oldest()
    assert (oldest.what, oldest.on, oldest.detail) == ("lease", "queue and admission", "worker w1")
    # The first has waited through both pauses, the second through one.
    assert newer.seconds + 0.049 < oldest.seconds < time.monotonic() - began
    assert (newer.what, newer.detail) == ("batch", "step 7")
    store.ready = True
    wakes.notify(Kind.LEASE)
    await within(20, first)
    assert [wait.what for wait in waits.oldest()] == ["batch"]
    wakes.notify(Kind.TAKE)
    await within(20, second)
    assert waits.oldest() == []


async def test_memory_when_sampled_then_the_next_calls_have_the_new_limit() -> None:
    ledger, store, _, memory = make_ledger(limit=1000)
    group = Completion("a", 1, b"x" * 600, 0, (3,), 2, 1.0)
    await ledger.complete_tasks([group])
    await ledger.take_batch(1, 1, (), 0)
    memory.sample(200, 300, 1000)
    lost, found = await ledger.complete_tasks([replace(group, task_id="lost"), group])
    assert isinstance(lost, LeaseLost)
    assert found is True
    await ledger.take_batch(1, 1, (), 0)
    assert store.limits == [1000, 1000, 700, 700]
