"""Served results: how long they stay, and which go first when there is no room."""

from __future__ import annotations

import pytest
from tests.ledger_support import Book, make_group, open_book, returned

from areal.errors import CapacityExceeded, NotFound
from areal.types import Purpose
from areal_buffer.records import RECORD_BYTES


async def serve(book: Book, *ids: str) -> None:
    await book.submit(*ids, purpose=Purpose.SERVE)
    leases = await book.lease(len(ids))
    for task_id in ids:
        await book.complete(task_id, leases[task_id])


async def kept(book: Book, *ids: str) -> list[str]:
    """Those whose result can be read."""
    records = book.store.read(ids, groups=True)
    return [each.task.task_id async for each in records if each.HasField("group")]


async def squeeze(book: Book, *, to: int = 0) -> None:
    """Somebody needs room: more than is left when no more than `to` bytes stay."""
    with pytest.raises(CapacityExceeded, match="try again in"):
        await book.submit("squeezing", purpose=Purpose.SERVE, limit=to)


async def test_result_when_read_then_it_stays_for_another_read_and_goes_minutes_later(
    book: Book,
) -> None:
    await serve(book, "a", "b")
    await book.store.mark_read(["a", "unknown"])
    await book.store.sweep()
    assert await kept(book, "a", "b") == ["a", "b"]
    await book.store.mark_read(["a"])
    await book.pass_time("read")
    swept = await book.store.sweep()
    assert swept.released == 1
    assert await kept(book, "a", "b") == ["b"]
    assert await book.state("a") == "delivered"
    assert await book.held() == await book.recount()
    assert await book.submit("b", purpose=Purpose.SERVE) == [False]


async def test_result_when_released_and_submitted_again_then_it_runs_again(book: Book) -> None:
    await serve(book, "a")
    await book.store.mark_read(["a"])
    await book.pass_time("read")
    await book.store.sweep()
    assert await book.submit("a", purpose=Purpose.SERVE) == [True]
    assert await book.submit("a", purpose=Purpose.SERVE) == [False]
    assert await book.counts() == {"queued": 1}
    await book.complete("a", (await book.lease())["a"])
    assert await kept(book, "a") == ["a"]
    assert await book.counts() == {"delivered": 1}
    await book.store.sweep()
    assert await kept(book, "a") == ["a"]
    assert await book.held() == await book.recount()


async def test_result_when_room_is_needed_then_read_ones_go_first_but_not_at_once(
    book: Book,
) -> None:
    await serve(book, "a", "b", "c")
    await book.store.mark_read(["b"])
    await squeeze(book)
    assert await kept(book, "a", "b", "c") == ["a", "b", "c"]
    await book.pass_time("read")
    await squeeze(book)
    assert await kept(book, "a", "b", "c") == ["a", "c"]
    assert await book.held() == await book.recount()


async def test_result_when_room_is_needed_then_the_oldest_go_and_no_more_than_needed(
    book: Book,
) -> None:
    ids = ["a", "b", "c", "d"]
    for task_id in ids:
        await serve(book, task_id)
    for age, task_id in enumerate(ids):
        await book.redis.zadd(f"{book.prefix}results", {task_id: age})
    _, held = await book.held()
    task = held // len(ids)
    body = task - RECORD_BYTES - len(make_payload("a"))
    # Four fifths of the limit are two tasks and one that is only submitted.
    limit = int((2 * task + RECORD_BYTES + body + 64) / 0.8)
    assert await book.submit("new", purpose=Purpose.SERVE, limit=limit) == [True]
    assert await kept(book, *ids) == ["c", "d"]
    assert await book.state("a") == ""
    with pytest.raises(NotFound, match="task a: unknown, or released"):
        await book.store.ended(["a"])
    assert await book.held() == await book.recount()


async def test_result_when_nobody_reads_it_then_it_goes_with_its_time(redis_process: str) -> None:
    async with open_book(redis_process, serve_result_ttl_ms=10_000) as book:
        await serve(book, "a", "b")
        await book.store.sweep()
        assert await kept(book, "a", "b") == ["a", "b"]
        await book.pass_time("results")
        assert (await book.store.sweep()).released == 2
        assert await book.state("a") == ""
        assert await book.held() == (0, 0)
        assert await book.counts() == {"delivered": 2}


async def test_dead_letter_when_served_then_it_stays_until_dropped(book: Book) -> None:
    await book.submit("a", purpose=Purpose.SERVE)
    for _ in range(2):
        token = (await book.lease())["a"]
        await book.store.return_leases([returned("a", token, "workflow_error")], limit=2**50)
    await book.pass_time("results")
    await book.store.sweep()
    assert await book.state("a") == "dead_lettered"
    assert await book.held() == await book.recount()
    await book.store.drop_dead_letters(["a"])
    assert await book.held() == (0, RECORD_BYTES)
    await book.pass_time("results")
    await book.store.sweep()
    assert await book.state("a") == ""
    assert await book.held() == (0, 0)


def make_payload(task_id: str) -> bytes:
    from areal.protocol.trajectories import pack_group

    return pack_group(make_group(task_id))
