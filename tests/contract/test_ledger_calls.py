"""Calls of many parts: what comes in several scripts or messages is whole in the end."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.ledger_support import Book, finished, ledger_config

import areal_buffer.redis_store
import areal_buffer.servicer
from areal.v1 import buffer_service_pb2 as pb
from areal_buffer.metrics import BufferMetrics
from areal_buffer.records import MemoryGauge
from areal_buffer.servicer import BufferService


def servicer_of(book: Book) -> Any:
    """Its calls that do not wait, without gRPC around them."""
    memory, metrics = MemoryGauge(1 << 40), BufferMetrics(CollectorRegistry())
    return BufferService(None, book.store, None, memory, metrics, ledger_config(""))  # type: ignore[arg-type]


async def test_submit_when_it_takes_several_scripts_then_only_the_last_seals(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may look between two of them: sealed, with nothing queued, would be the end."""
    sealed, run = [], book.store._scripts.run

    async def watched(name: str, *args: Any) -> Any:
        sealed.append(args[1])
        return await run(name, *args)

    await book.register()
    monkeypatch.setattr(book.store._scripts, "run", watched)
    ids = [str(number) for number in range(1200)]
    accepted = await book.submit(*ids, incarnation=book.incarnation, seal=True)
    assert (accepted, sealed) == ([True] * 1200, [0, 0, 1])


async def test_get_tasks_when_they_fill_several_messages_then_each_is_told_once(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [f"known-{number}" for number in range(10)]
    await book.submit(*known)
    ids = [f"{kind}-{number}" for number in range(10) for kind in ("known", "ghost")]
    monkeypatch.setattr(areal_buffer.servicer, "_MAX_RESPONSE_BYTES", 100)
    servicer = servicer_of(book)
    told: list[str] = []
    messages = at = 0
    while at < len(ids):
        request = pb.BufferServiceGetTasksRequest(task_ids=ids[at:])
        page = await servicer.GetTasks(request, None)
        assert page.looked_up > 0
        told += [record.task.task_id for record in page.records]
        at += page.looked_up
        messages += 1
    assert told == known
    assert messages >= 5


async def test_fetch_when_groups_are_large_then_they_come_a_few_at_a_time_and_none_is_left_out(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{number}" for number in range(7)]
    await book.register(size=len(names))
    await book.run(*names)
    assert await book.take(1) == ("taken", names)
    whole = [finished(name).payload for name in names]
    monkeypatch.setattr(areal_buffer.redis_store, "_FETCH_BYTES", 2 * max(map(len, whole)))
    fetched = [each async for each in book.store.fetch(book.incarnation, 1, names)]
    assert [payload for some in fetched for payload in some] == whole
    assert 1 < len(fetched) <= len(names)
