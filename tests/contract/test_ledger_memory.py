"""The ledger near its memory limit, and large groups, against the real scripts on Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.ledger_support import (
    EMPTY,
    FULL,
    Book,
    complete,
    finished,
    make_group,
    make_task,
    new_task,
)

from areal.errors import CapacityExceeded, LeaseLost, Unavailable
from areal.protocol.trajectories import GroupCodec, group_to_pb, pack_group, task_to_pb
from areal.types import Purpose
from areal_buffer.records import ENDED_BYTES


async def test_memory_when_near_limit_then_checkpoint_first_only_if_that_helps(
    book: Book,
) -> None:
    await book.register()
    await book.train(1)
    await book.run("a", "b", version=0)
    take = await book.store.take(1, 2, (), limit=FULL)
    assert take.state == "checkpoint_first"
    assert "commit step 1" in take.waiting_for
    await book.store.commit(1, 1, 1)
    assert await book.take(2, limit=FULL) == ("taken", ["a", "b"])


async def test_memory_when_full_then_only_what_the_next_batch_needs_is_completed(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await book.submit("a", "b", "c", "d")
    leases = await book.lease(4)
    assert await book.complete("a", leases["a"], limit=FULL)
    assert await book.complete("b", leases["b"], limit=FULL)
    with pytest.raises(CapacityExceeded, match="task c: the ledger is near its memory limit"):
        await book.complete("c", leases["c"], limit=FULL)
    assert await book.state("c") == "running"
    assert await book.take(1, limit=FULL) == ("taken", ["a", "b"])
    assert await book.complete("c", leases["c"], limit=FULL)


async def test_memory_when_full_then_submission_is_refused_only_with_enough_queued(
    book: Book,
) -> None:
    await book.register(size=1, eta=1)
    assert await book.submit("a", "b", limit=FULL) == [True, True]
    with pytest.raises(CapacityExceeded, match="has 2 tasks queued"):
        await book.submit("c", limit=FULL)
    assert await book.submit("a", limit=FULL) == [False]
    with pytest.raises(CapacityExceeded):
        await book.submit("s", purpose=Purpose.SERVE, limit=FULL)


async def test_group_when_large_then_stored_as_handed_in_and_read_back_whole(book: Book) -> None:
    await book.register(size=2)
    await book.submit("large", "plain")
    await book.submit("served", purpose=Purpose.SERVE)
    leases = await book.lease(3)
    large = make_group("large", length=2000)
    whole = group_to_pb(large).SerializeToString()
    group = replace(finished("large"), payload=pack_group(large))
    assert await complete(book.store, leases["large"], group, limit=EMPTY)
    served = replace(group, task_id="served")
    assert await complete(book.store, leases["served"], served, limit=EMPTY)
    assert await book.complete("plain", leases["plain"])
    # As a worker that does not compress sends it.
    plain = GroupCodec().expand(finished("plain").payload)
    await book.redis.set(f"{book.prefix}group:plain", plain)
    stored = await book.redis.strlen(f"{book.prefix}group:large")
    assert stored == len(group.payload) < len(whole) / 2
    assert await book.take(1) == ("taken", ["large", "plain"])
    some = book.store.fetch(book.incarnation, 1, ["large", "plain"])
    assert [each async for payloads in some for each in payloads] == [group.payload, plain]
    (record,) = [r async for r in book.store.read(["served"], groups=True)]
    assert record.group.SerializeToString() == whole


async def test_calls_when_redis_refuses_to_write_then_its_reason_is_told_and_nothing_changes(
    book: Book,
) -> None:
    await book.register()
    await book.run("a", "b")
    await book.submit("c")
    lease = (await book.lease())["c"]
    await book.take(1)
    counts = await book.counts()

    async def refused(error: type[Exception]) -> None:
        for call in (
            book.submit("d"),
            book.complete("c", lease),
            book.store.reject("c", lease, "no"),
            book.store.commit(book.incarnation, 1, 1),
            book.store.cancel(["c"], None, reason="", incarnation=0),
        ):
            with pytest.raises(error):
                await call

    redis = book.redis
    await redis.config_set("maxmemory", 1)  # type: ignore[attr-defined]
    try:
        await refused(CapacityExceeded)
    finally:
        await redis.config_set("maxmemory", 0)  # type: ignore[attr-defined]
    await redis.replicaof("127.0.0.1", 1)  # type: ignore[attr-defined]
    try:
        await refused(Unavailable)
    finally:
        await redis.replicaof("NO", "ONE")  # type: ignore[attr-defined]
    await redis.config_set("min-replicas-to-write", 1)  # type: ignore[attr-defined]
    try:
        await refused(Unavailable)
    finally:
        await redis.config_set("min-replicas-to-write", 0)  # type: ignore[attr-defined]
    assert await book.counts() == counts


def _with_a_long_row(task_id: str) -> bytes:
    message = task_to_pb(make_task(task_id))
    message.data_json += " " * 500
    return message.SerializeToString()


async def test_task_when_it_has_been_trained_on_and_released_then_200_bytes_stay(
    book: Book,
) -> None:
    """A run of weeks ends millions of tasks."""
    size = 256
    await book.register(size=size, concurrent=10_000)

    async def train(steps: range) -> int:
        for step in steps:
            await book.take(step)
            ids = [f"e0-{step * size + place}" for place in range(size)]
            tasks = [replace(new_task(each), body=_with_a_long_row(each)) for each in ids]
            await book.store.submit(tasks, incarnation=0, seal=False, limit=EMPTY)
            leases = await book.lease(size)
            groups = [replace(finished(each, step - 1), token=leases[each]) for each in ids]
            await book.store.complete(groups, limit=EMPTY)
            assert (await book.take(step))[0] == "taken"
            await book.store.commit(book.incarnation, step, step)
        # Of keys, and of the table that they are in: what Redis uses in all comes and goes with the
        # buffers of its clients, and how much it says that these are is seconds old.
        async with book.redis.pipeline(transaction=False) as pipe:
            for key in await book.redis.keys():
                pipe.memory_usage(key, samples=0)
            keys = sum(await pipe.execute())
        tables = (await book.redis.memory_stats())["db.0"]
        return int(keys + tables["overhead.hashtable.main"])

    before = await train(range(1, 3))
    after = await train(range(3, 20))
    assert (after - before) / (17 * size) <= ENDED_BYTES
    first = f"e0-{size}"
    assert await book.state(first) == "trained"
    assert await book.submit(first) == [False]
    with pytest.raises(LeaseLost):
        await book.complete(first, 1)
    assert await book.held() == await book.recount()
