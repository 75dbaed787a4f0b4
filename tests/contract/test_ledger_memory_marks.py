"""What a ledger that fills up still takes, and from whom: the marks, on real Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.ledger_support import FULL, Book, complete, finished, make_task, new_task, open_book

from areal.errors import CapacityExceeded
from areal.protocol.trajectories import task_to_pb
from areal.types import Purpose
from areal_buffer.records import RECORD_BYTES

LIMIT = 1_000_000
SIZE = 10_000
"""Of a task with its record."""
MARK = int(0.8 * LIMIT) // SIZE
"""Tasks that clients may have queued."""


def sized(task_id: str, purpose: Purpose) -> bytes:
    """A task that takes SIZE bytes with its record."""
    message = task_to_pb(make_task(task_id, purpose))
    message.data_json = " " * 200  # from 128 on its length takes two bytes
    message.data_json += " " * (SIZE - RECORD_BYTES - message.ByteSize())
    return message.SerializeToString()


async def offer(book: Book, *ids: str, purpose: Purpose = Purpose.SERVE, trainer: bool = False):
    """Submits tasks of SIZE bytes each; how many found room, and the refusal."""
    tasks = [replace(new_task(each, purpose), body=sized(each, purpose)) for each in ids]
    before = (await book.store.stats()).submitted
    refused = None
    try:
        incarnation = book.incarnation if trainer else 0
        await book.store.submit(tasks, incarnation=incarnation, seal=False, limit=LIMIT)
    except CapacityExceeded as error:
        refused = error
    return (await book.store.stats()).submitted - before, refused


async def complete_sized(book: Book, task_id: str, token: int, size: int, version: int = 0) -> bool:
    group = replace(finished(task_id, version), payload=b"y" * size)
    return await complete(book.store, token, group, limit=LIMIT)


async def test_submit_when_one_call_brings_too_much_then_cut_at_four_fifths(book: Book) -> None:
    found_room, refused = await offer(book, *(f"s{number}" for number in range(400)))
    assert found_room == MARK
    assert await book.held() == (0, MARK * SIZE)
    assert refused is not None
    assert str(refused).endswith("limit and has 80 tasks queued; try again in 5 s")
    assert refused.retry_after_s == 5


async def test_submit_when_clients_have_filled_their_part_then_trainer_and_evaluation_fit(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await offer(book, *(f"s{number}" for number in range(100)))
    assert (await offer(book, "one-more"))[0] == 0
    found_room, _ = await offer(book, *(f"v1-{number}" for number in range(100)), trainer=True)
    assert found_room == 100 - MARK
    rows = [f"t{number}" for number in range(10)]
    found_room, refused = await offer(book, *rows, purpose=Purpose.TRAIN, trainer=True)
    assert found_room == 4  # all that may run ahead
    assert refused is not None
    assert refused.retry_after_s == 1


async def test_complete_when_results_reach_nine_tenths_then_clients_have_to_wait(
    book: Book,
) -> None:
    await book.submit(*(f"s{number}" for number in range(6)), purpose=Purpose.SERVE)
    leases = await book.lease(6)
    for number in range(4):
        assert await complete_sized(book, f"s{number}", leases[f"s{number}"], 225_000)
    with pytest.raises(CapacityExceeded, match=r"task s4: .* keep the lease; try again in") as no:
        await complete_sized(book, "s4", leases["s4"], 225_000)
    assert no.value.retry_after_s == 5
    assert await book.state("s4") == "running"
    assert 0.9 * LIMIT < sum(await book.held()) < 0.91 * LIMIT


async def test_complete_when_the_ledger_is_full_then_a_batch_of_train_and_of_evaluation_fits(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await book.submit("s", purpose=Purpose.SERVE)
    evaluation = [f"v1-{number}" for number in range(3)]
    await book.submit(*evaluation, purpose=Purpose.SERVE, incarnation=book.incarnation)
    await book.submit("a", "b", "c")
    leases = await book.lease(7)
    await complete_sized(book, "s", leases["s"], LIMIT)
    for each in evaluation[:2]:
        assert await complete_sized(book, each, leases[each], 100_000)
    with pytest.raises(CapacityExceeded):
        await complete_sized(book, evaluation[2], leases[evaluation[2]], 100_000)
    for each in "ab":
        assert await complete_sized(book, each, leases[each], 100_000)
    with pytest.raises(CapacityExceeded, match=r"task c: .*; try again in 1 s"):
        await complete_sized(book, "c", leases["c"], 100_000)
    assert await book.take(1, limit=LIMIT) == ("taken", ["a", "b"])
    assert await complete_sized(book, "c", leases["c"], 100_000)


async def test_take_when_served_results_fill_the_ledger_then_no_checkpoint_is_asked_for(
    book: Book,
) -> None:
    """A commit would release next to nothing."""
    await book.register()
    await book.train(1)
    await book.submit("s", purpose=Purpose.SERVE)
    await complete_sized(book, "s", (await book.lease())["s"], LIMIT)
    assert (await book.take(2, limit=LIMIT))[0] == "waiting"
    await book.submit("t")
    await complete_sized(book, "t", (await book.lease())["t"], 2 * LIMIT, version=1)
    assert (await book.take(2, limit=LIMIT))[0] == "checkpoint_first"


async def test_lease_when_there_is_a_trainer_then_serve_leaves_half_of_the_slots(
    book: Book,
) -> None:
    serve = [f"s{number}" for number in range(8)]
    await book.submit(*serve, purpose=Purpose.SERVE)
    await book.register(size=2, eta=1, concurrent=8)
    leases = await book.lease(8)
    assert sorted(leases) == ["s0", "s1", "s2"]
    found, reason = await book.leases(8)
    assert not found
    assert reason == (
        "admission: of max_concurrent_rollouts 8, 3 run serve tasks; the rest is for training"
    )
    await book.submit("a", "b", "c", "d", "e")
    assert sorted(await book.lease(8)) == ["a", "b", "c", "d"]
    # Who is silent for too long may continue, unless there is no room for its task any more.
    await book.expire_lease("s2")
    assert await book.store.renew("w", [("s2", leases["s2"])]) == []
    await book.expire_lease("s2")
    await book.register(size=2, eta=1, concurrent=7)
    assert await book.store.renew("w", [("s2", leases["s2"])]) == []
    await book.expire_lease("s2")
    await book.register(size=2, eta=1, concurrent=6)
    assert await book.store.renew("w", [("s2", leases["s2"])]) == ["s2"]


async def test_lease_when_there_is_no_trainer_or_one_slot_then_serve_has_them_all(
    book: Book,
) -> None:
    await book.submit(*(f"s{number}" for number in range(200)), purpose=Purpose.SERVE)
    assert len(await book.lease(500)) == 100
    for task_id in [f"s{number}" for number in range(100)]:
        await book.store.cancel([task_id], None, reason="", incarnation=0)
    await book.register(size=2, eta=1, concurrent=1)
    assert len(await book.lease(5)) == 1


async def test_cancel_when_of_serve_tasks_then_their_bytes_are_free_at_once(book: Book) -> None:
    await offer(book, *(f"s{number}" for number in range(100)))
    token = (await book.lease())["s0"]
    await book.return_lease("s0", token, partial=b"j" * 50_000)
    assert await book.held() == (0, MARK * SIZE + 50_000)
    await book.submit("brief", purpose=Purpose.SERVE, time_to_live_ms=1)
    assert await book.store.cancel([], Purpose.SERVE, reason="", incarnation=0) >= MARK
    await book.store.sweep()
    assert await book.held() == (0, (MARK + 1) * RECORD_BYTES) == await book.recount()
    assert not await book.redis.hexists(f"{book.prefix}task:s0", "partial")
    assert (await offer(book, *(f"n{number}" for number in range(100))))[0] == 75


async def test_journal_when_the_ledger_is_full_then_dropped_and_the_task_queued(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    assert await book.return_lease("a", token, partial=b"j", limit=FULL) == "queued"
    assert await book.held() == await book.recount()
    (lease,), _ = await book.leases(1)
    assert lease.partial == b""


async def test_submit_when_another_ledger_fills_the_redis_then_this_one_is_not_refused(
    redis_process: str,
) -> None:
    async with open_book(redis_process) as one, open_book(redis_process) as other:
        assert (await offer(one, *(f"s{number}" for number in range(400))))[1] is not None
        found_room, refused = await offer(other, *(f"s{number}" for number in range(MARK)))
        assert (found_room, refused) == (MARK, None)


async def test_lease_when_clients_hold_their_slots_then_evaluations_pass_them(book: Book) -> None:
    await book.register(size=2, eta=1, concurrent=8)
    await book.submit(*(f"s{number}" for number in range(8)), purpose=Purpose.SERVE)
    assert sorted(await book.lease(8)) == ["s0", "s1", "s2"]
    evaluation = [f"v1-{number}" for number in range(8)]
    await book.submit(*evaluation, purpose=Purpose.SERVE, incarnation=book.incarnation)
    assert sorted(await book.lease(8)) == ["v1-0"]
    await book.submit("a", "b")
    assert sorted(await book.lease(8)) == ["a", "b"]
    assert (await book.store.stats()).oldest_queued_time is not None
