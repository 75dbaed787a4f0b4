"""What goes together on the way to the ledger, and who hears of what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.buffer_client import BufferClient
from tests.ledger_support import make_group

from areal.clients.buffer import worker
from areal.clients.buffer.batching import Batching
from areal.errors import InvalidInput, LeaseLost, Unavailable
from areal.protocol.leases import Return, ReturnCause
from areal.v1 import buffer_service_pb2 as pb


class Ledger:
    """Answers when told to, in the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.open = asyncio.Semaphore(0)
        self.away = False

    async def send(self, request: pb.CompleteTasksRequest) -> list[pb.CompletionResult]:
        assert request.worker_id == "w"
        ids = [completion.lease.task_id for completion in request.completions]
        self.calls.append(ids)
        await asyncio.sleep(0)  # as a real call does, even if it is answered at once
        await self.open.acquire()
        if self.away:
            raise Unavailable("Redis is away")
        return [
            pb.CompletionResult(error="LeaseLost", message=f"{each} was re-leased")
            if each == "lost"
            else pb.CompletionResult(recorded=True)
            for each in ids
        ]


def batching_of(ledger: Ledger) -> Batching[pb.CompleteTasksRequest, pb.CompletionResult]:
    return Batching(lambda worker: pb.CompleteTasksRequest(worker_id=worker), ledger.send)


def group(task_id: str, size: int = 10) -> Callable[[pb.CompleteTasksRequest], int]:
    def add(request: pb.CompleteTasksRequest) -> int:
        request.completions.add(lease=pb.LeaseRef(task_id=task_id), group=bytes(size))
        return size

    return add


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_offer_when_alone_then_sent_at_once() -> None:
    ledger = Ledger()
    ledger.open.release()
    assert await batching_of(ledger).offer("w", group("a"))
    assert ledger.calls == [["a"]]


async def test_offer_when_both_calls_have_just_been_answered_then_sent_all_the_same() -> None:
    ledger = Ledger()
    batching = batching_of(ledger)

    async def worker(*task_ids: str) -> None:
        for each in task_ids:
            await batching.offer("w", group(each))

    workers = []
    for task_ids in (("a", "c"), ("b",)):
        workers.append(asyncio.create_task(worker(*task_ids)))
        await settle()
    assert ledger.calls == [["a"], ["b"]]
    for _ in range(3):
        ledger.open.release()
    await asyncio.wait_for(asyncio.gather(*workers), 10)
    assert ledger.calls == [["a"], ["b"], ["c"]]


async def test_offers_when_calls_are_under_way_then_the_next_one_takes_all_that_is_ready() -> None:
    ledger = Ledger()
    batching = batching_of(ledger)
    offers = []
    for name in "abcde":
        offers.append(asyncio.create_task(batching.offer("w", group(name))))
        await settle()
    assert ledger.calls == [["a"], ["b"]]
    ledger.open.release()
    await settle()
    assert ledger.calls == [["a"], ["b"], ["c", "d", "e"]]
    for _ in range(2):
        ledger.open.release()
    assert all(result.recorded for result in await asyncio.gather(*offers))


async def test_offers_when_large_then_a_call_takes_no_more_than_its_size() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.open.release()
    batching = batching_of(ledger)
    names = ["a", "b", "c", "d", "e"]
    await asyncio.gather(*(batching.offer("w", group(name, 600_000)) for name in names))
    assert ledger.calls == [["a", "b"], ["c", "d"], ["e"]]


async def test_offers_when_both_calls_are_free_then_they_share_more_than_a_few() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.open.release()
    batching = batching_of(ledger)
    many, few = "abcdefghijklmnopqrst", "uvw"
    for names in (many, few):
        await asyncio.gather(*(batching.offer("w", group(name)) for name in names))
    assert ledger.calls == [list(many[:10]), list(many[10:]), list(few)]


async def test_offer_when_refused_then_only_it_hears_of_it() -> None:
    ledger = Ledger()
    batching = batching_of(ledger)

    def broken(_: pb.CompleteTasksRequest) -> int:
        raise InvalidInput("rewards: length 4")

    ledger.open.release()
    results = await asyncio.gather(
        batching.offer("w", group("a")),
        batching.offer("w", broken),
        batching.offer("w", group("lost")),
        batching.offer("w", group("b")),
        return_exceptions=True,
    )
    assert ledger.calls == [["a", "lost", "b"]]
    assert all(isinstance(results[at], pb.CompletionResult) for at in (0, 3))
    assert isinstance(results[1], InvalidInput)
    assert isinstance(results[2], LeaseLost)
    assert "lost was re-leased" in str(results[2])


async def test_offer_when_the_call_fails_then_all_of_it_hear_and_the_next_goes_on() -> None:
    ledger = Ledger()
    ledger.away = True
    batching = batching_of(ledger)
    ledger.open.release()
    both = [batching.offer("w", group(name)) for name in "ab"]
    for result in await asyncio.gather(*both, return_exceptions=True):
        assert isinstance(result, Unavailable)
    ledger.away = False
    ledger.open.release()
    assert await batching.offer("w", group("c"))


async def test_offer_when_its_caller_was_cancelled_then_it_is_not_sent() -> None:
    ledger = Ledger()
    batching = batching_of(ledger)
    offers = []
    for name in "abcd":
        offers.append(asyncio.create_task(batching.offer("w", group(name))))
        await settle()
    offers[2].cancel()
    for _ in range(3):
        ledger.open.release()
    results = await asyncio.gather(*offers, return_exceptions=True)
    assert ledger.calls == [["a"], ["b"], ["d"]]
    assert isinstance(results[2], asyncio.CancelledError)
    assert all(isinstance(results[at], pb.CompletionResult) for at in (0, 1, 3))


@pytest.mark.parametrize("sent", [1, 3])
async def test_close_when_offers_are_open_then_they_are_cancelled(sent: int) -> None:
    ledger = Ledger()
    batching = batching_of(ledger)
    offers = []
    for number in range(sent):
        offers.append(asyncio.create_task(batching.offer("w", group(str(number)))))
        await settle()
    await batching.close()
    results = await asyncio.gather(*offers, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)


async def test_offer_when_no_message_can_hold_it_then_refused_by_name_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "_MAX_PART_BYTES", 100)
    client = BufferClient("127.0.0.1:1")  # no one is asked
    try:
        async with asyncio.timeout(60):
            with pytest.raises(InvalidInput, match=r"group 'big' has \d+ bytes: at most 100"):
                await client.complete_task("big", 1, make_group("big", length=500), "w")
            with pytest.raises(InvalidInput, match="journal of task 'big' has 101 bytes"):
                await client.return_task(
                    "big", 1, Return(ReturnCause.DRAIN, partial=lambda: bytes(101))
                )
    finally:
        await client.close()
