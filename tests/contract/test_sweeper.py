"""What a buffer process does beside its calls, on a real Redis: listening and sweeping."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from tests.ledger_support import Book

from areal.errors import Unavailable
from areal_buffer.ledger import Kind, Wakes
from areal_buffer.metrics import BufferMetrics
from areal_buffer.records import MemoryGauge, Swept
from areal_buffer.redis_store import RedisStore
from areal_buffer.sweeper import Sweeper


def sweeper(store: RedisStore, wakes: Wakes) -> Sweeper:
    return Sweeper(store, wakes, MemoryGauge(1 << 40), BufferMetrics(CollectorRegistry()), 0.01)


async def heard(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 20)


async def test_listen_when_its_connection_was_lost_then_all_who_wait_look_again(
    book: Book,
) -> None:
    """No listener got what was published meanwhile."""
    wakes = Wakes()
    first = [wakes.next(kind) for kind in Kind]
    listening = asyncio.create_task(sweeper(book.store, wakes).listen_forever(book.redis))
    try:
        for event in first:
            await heard(event)
        second = [wakes.next(kind) for kind in Kind]
        await book.redis.client_kill_filter(_type="pubsub")
        for event in second:
            await heard(event)
        third, other = wakes.next(Kind.TAKE), wakes.next(Kind.LEASE)
        await book.redis.publish(book.store.wake_channel, "take")
        await heard(third)
        assert not other.is_set()
    finally:
        listening.cancel()
        await asyncio.wait({listening})


@pytest.mark.parametrize(
    "full",
    [Swept(0, 500, 0, 0, 0), Swept(0, 0, 500, 0, 0), Swept(0, 0, 0, 500, 0)],
    ids=["leases", "deadlines", "results"],
)
async def test_sweep_when_a_round_was_full_then_the_rest_is_swept_at_once(
    book: Book, full: Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [full, full, Swept(0, 3, 3, 0, 0)]

    async def sweep() -> Swept:
        return rounds.pop(0)

    monkeypatch.setattr(book.store, "sweep", sweep)
    await sweeper(book.store, Wakes())._sweep_once()
    assert rounds == []


async def test_sweep_when_redis_was_away_then_the_next_one_still_comes(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    await book.submit("a")
    await book.lease()
    away, swept, sweep = [Unavailable("Redis is away")] * 3, asyncio.Event(), book.store.sweep

    async def sometimes() -> Swept:
        if away:
            raise away.pop()
        result = await sweep()
        swept.set()
        return result

    monkeypatch.setattr(book.store, "sweep", sometimes)
    sweeping = asyncio.create_task(sweeper(book.store, Wakes()).sweep_forever())
    try:
        await heard(swept)
    finally:
        sweeping.cancel()
        await asyncio.wait({sweeping})


async def test_renew_when_there_are_thousands_then_all_that_are_lost_are_named(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    unknown = [(f"x{number}", 1) for number in range(1200)]
    lost = await book.store.renew("w", [*unknown[:600], ("a", token), *unknown[600:]])
    assert lost == [task_id for task_id, _ in unknown]
