"""Submitting (L1, L6), leases, and who may complete (L2), against the real scripts on Redis."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.ledger_support import EMPTY, Book, finished

from areal.errors import InvalidInput, LeaseLost, NotFound
from areal.types import Purpose


async def test_submit_when_id_is_known_then_nothing_changes(book: Book) -> None:
    assert await book.submit("a", "b", "a") == [True, True, False]
    assert await book.submit("b") == [False]
    assert await book.counts() == {"queued": 2}


async def test_submit_when_position_was_seen_then_not_accepted(book: Book) -> None:
    assert await book.submit("a", position=(0, 7)) == [True]
    assert await book.submit("b", position=(0, 7)) == [False]
    assert await book.submit("c", position=(1, 7)) == [True]
    assert await book.submit("d", position=(0, 6)) == [True]


async def test_lease_when_several_queued_then_in_order_of_submission(book: Book) -> None:
    await book.submit("c", "a", "b")
    assert list(await book.lease(2)) == ["c", "a"]
    assert list(await book.lease(2)) == ["b"]


async def test_lease_when_nothing_is_queued_then_says_so(book: Book) -> None:
    leases, reason = await book.leases(1)
    assert leases == []
    assert reason == "queue empty"


async def test_complete_when_lease_expired_and_not_released_then_counts(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    await book.expire_lease("a")
    assert await book.state("a") == "queued"
    assert await book.complete("a", token)
    assert await book.counts() == {"completed": 1}


async def test_complete_when_task_was_released_then_refused(book: Book) -> None:
    await book.submit("a")
    first = (await book.lease())["a"]
    await book.expire_lease("a")
    second = (await book.lease())["a"]
    assert second > first
    with pytest.raises(LeaseLost, match=r"task a: lease .* no longer holds; the task is running"):
        await book.complete("a", first)
    assert await book.complete("a", second)
    with pytest.raises(LeaseLost):
        await book.complete("a", first)


async def test_lease_when_a_worker_was_started_again_then_its_leases_are_given_back_at_once(
    book: Book,
) -> None:
    await book.submit("a", "b", "c")
    await book.submit("s", purpose=Purpose.SERVE)
    await book.lease(1, worker="other", boot=5)  # one of them
    mine = await book.lease(2, worker="w0", boot=7)
    assert await book.counts() == {"queued": 1, "running": 3}
    assert await book.lease(1, worker="w0", boot=7) != {}  # the same life: nothing changes
    assert await book.counts() == {"running": 4}
    again = await book.lease(9, worker="w0", boot=8)
    assert set(again) >= set(mine)
    assert all(again[task_id] > mine[task_id] for task_id in mine)
    assert await book.counts() == {"running": 4}  # the other worker's lease was left alone
    task_id = next(iter(mine))
    async for record in book.store.read([task_id], groups=False):
        assert record.reason == "worker w0 died and was started again"
        assert record.infrastructure_attempts == 1
    with pytest.raises(LeaseLost, match="no longer holds"):
        await book.complete(task_id, mine[task_id])
    assert await book.complete(task_id, again[task_id])


async def test_lease_when_a_newer_life_of_the_worker_has_begun_then_the_older_is_refused(
    book: Book,
) -> None:
    await book.submit("a", "b")
    first = await book.lease(1, worker="w0", boot=7)
    await book.lease(0, worker="w0", boot=8)
    # Its late answer still counts, for no one has the task yet; but it gets no more.
    assert await book.complete("a", first["a"])
    with pytest.raises(LeaseLost, match="worker w0: a newer process of this name has begun"):
        await book.lease(1, worker="w0", boot=7)
    assert await book.counts() == {"completed": 1, "queued": 1}


async def test_renew_when_a_newer_life_of_the_worker_has_begun_then_the_lease_stays_given_back(
    book: Book,
) -> None:
    """A renewal of the dead worker that was under way: no one would work on what it took up."""
    await book.submit("a")
    leases = await book.lease(1, worker="w0", boot=7)
    await book.lease(0, worker="w0", boot=8)
    assert await book.store.renew("w0", list(leases.items())) == ["a"]
    assert await book.counts() == {"queued": 1}


async def test_lease_when_named_workers_come_and_go_then_what_is_known_of_them_goes_too(
    book: Book,
) -> None:
    async def named() -> dict[str, int]:
        keys = [key async for key in book.redis.scan_iter(f"{book.prefix}*")]
        return {
            key.decode().rpartition(":")[2]: await book.redis.ttl(key)
            for key in keys
            if b"pod-" in key or b"boots" in key
        }

    for number in range(3):
        await book.lease(1, worker=f"pod-{number}", boot=7)
    assert set(await named()) == {"pod-0", "pod-1", "pod-2"}
    assert all(0 < seconds <= 86400 for seconds in (await named()).values())
    # One that continues working stays known, also through the day's end.
    await book.redis.expire(f"{book.prefix}life:pod-1", 60)
    await book.lease(1, worker="pod-1", boot=7)
    assert (await named())["pod-1"] > 80000
    with pytest.raises(LeaseLost, match="a newer process of this name"):
        await book.lease(1, worker="pod-1", boot=6)


async def test_lease_when_journals_pass_a_message_then_the_rest_comes_with_the_next_call(
    book: Book,
) -> None:
    ids = ["a", "b", "c", "d"]
    await book.submit(*ids)
    journal = bytes(20 * 1024 * 1024)
    for task_id, token in (await book.lease(4)).items():
        await book.return_lease(task_id, token, partial=journal)
    assert sorted(await book.lease(4)) == ["a", "b"]
    assert sorted(await book.lease(4)) == ["c", "d"]


async def test_lease_when_workers_have_no_lasting_name_then_none_gives_back(book: Book) -> None:
    await book.submit("a", "b")
    await book.lease(1)
    await book.lease(1)
    assert await book.counts() == {"running": 2}


async def test_complete_when_task_has_ended_then_refused(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    assert await book.store.cancel(["a"], None, reason="enough", incarnation=0) == 1
    with pytest.raises(LeaseLost, match="the task is cancelled"):
        await book.complete("a", token)
    assert await book.counts() == {"cancelled": 1}


async def test_complete_when_repeated_then_recorded_once(book: Book) -> None:
    await book.register()
    await book.submit("a", "b")
    leases = await book.lease(2)
    assert await book.complete("a", leases["a"])
    assert not await book.complete("a", leases["a"])
    await book.complete("b", leases["b"])
    assert await book.take(1) == ("taken", ["a", "b"])
    assert not await book.complete("a", leases["a"])
    await book.store.commit(book.incarnation, 1, 0)
    assert not await book.complete("a", leases["a"])
    await book.store.commit(book.incarnation, 1, 1)
    with pytest.raises(LeaseLost, match="the task is trained"):
        await book.complete("a", leases["a"])
    assert await book.counts() == {"trained": 2}


async def test_complete_when_token_is_older_than_lease_then_refused(book: Book) -> None:
    await book.register()
    await book.run("a", "b")
    assert await book.take(1) == ("taken", ["a", "b"])
    await book.take(2)
    await book.submit("c")
    token = (await book.lease())["c"]
    with pytest.raises(InvalidInput, match="version 0, but the task was leased at version 1"):
        await book.complete("c", token, version=0)
    assert await book.complete("c", token, version=1)


async def test_complete_when_some_of_several_are_refused_then_the_others_are_recorded(
    book: Book,
) -> None:
    await book.submit("a", "b", "c")
    leases = await book.lease(3)
    await book.complete("a", leases["a"])
    await book.store.reject("b", leases["b"], "")
    groups = [
        replace(finished(task_id), token=token)
        for task_id, token in [*leases.items(), ("nobody", 1)]
    ]
    again, refused, recorded, unknown = await book.store.complete(groups, limit=EMPTY)
    assert (again, recorded) == (False, True)
    assert isinstance(refused, LeaseLost)
    assert str(refused).startswith("task b: lease ")
    assert "\n" not in str(refused)
    assert isinstance(unknown, NotFound)
    assert str(unknown) == "task nobody: unknown"
    assert await book.counts() == {"completed": 2, "rejected": 1}


async def test_complete_when_unknown_task_then_not_found(book: Book) -> None:
    with pytest.raises(NotFound, match="task nobody"):
        await book.complete("nobody", 1)


async def test_renew_when_lease_is_held_then_extended_and_others_named(book: Book) -> None:
    await book.submit("a", "b", "c")
    leases = await book.lease(3)
    await book.store.cancel(["b"], None, reason="", incarnation=0)
    await book.expire_lease("c")
    await book.lease()  # c again
    assert await book.store.renew("w", list(leases.items())) == ["b", "c"]


async def test_renew_when_expired_and_not_released_then_runs_again(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    await book.expire_lease("a")
    assert await book.store.renew("w", [("a", token)]) == []
    assert await book.state("a") == "running"
    assert await book.complete("a", token)


async def test_sweep_when_there_was_an_outage_then_leases_are_extended(book: Book) -> None:
    await book.submit("a")
    await book.lease()
    await book.store.sweep()
    await book.redis.zadd(f"{book.prefix}running:train", {"a": 1})
    await book.redis.hincrby(f"{book.prefix}meta", "last_sweep", -10_001)
    swept = await book.store.sweep()
    assert (swept.extended, swept.requeued) == (1, 0)
    assert swept.gap_ms >= 10_001
    assert await book.state("a") == "running"
    await book.expire_lease("a")
    assert await book.state("a") == "queued"


async def test_sweep_when_the_clock_was_set_back_then_a_silent_worker_s_lease_ends_in_its_time(
    book: Book,
) -> None:
    """A host's clock is corrected, or a replica on another host takes over."""
    hour = 3_600_000
    await book.submit("a")
    await book.lease()
    await book.store.sweep()
    # Everything that was noted an hour ahead.
    await book.redis.zincrby(f"{book.prefix}running:train", hour, "a")
    await book.redis.hincrby(f"{book.prefix}meta", "last_sweep", hour)
    swept = await book.store.sweep()
    assert (swept.extended, swept.requeued) == (1, 0)
    seconds, _ = await book.redis.time()
    expiry = await book.redis.zscore(f"{book.prefix}running:train", "a")
    assert expiry - seconds * 1000 <= 62_000


async def test_sweep_when_time_to_live_has_passed_then_expired_unless_completed(
    book: Book,
) -> None:
    await book.submit("a", "b", "c", time_to_live_ms=1)
    leases = await book.lease(2)
    assert await book.complete("a", leases["a"])
    async with asyncio.timeout(30):
        while (await book.store.sweep()).expired == 0:
            pass
    assert await book.counts() == {"completed": 1, "expired": 2}
    with pytest.raises(LeaseLost, match="the task is expired"):
        await book.complete("b", leases["b"])
