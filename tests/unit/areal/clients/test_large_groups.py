"""A large group is packed beside the event loop, which other sessions need."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ledger_support import make_group

from areal.clients.buffer import worker
from areal.clients.buffer.worker import BufferWorker
from areal.protocol.trajectories import pack_group, unpack_group
from areal.types import TrajectoryGroup
from areal.v1 import buffer_service_pb2 as pb


@pytest.mark.parametrize("end", ["complete", "reject"])
@pytest.mark.parametrize(("tokens", "beside"), [(100, False), (worker._LARGE, True)])
async def test_group_when_it_is_large_then_it_is_packed_beside_the_loop(
    end: str, tokens: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, sent = list[int](), list[bytes]()

    def packing(group: TrajectoryGroup, *codec: Any) -> bytes:
        threads.append(threading.get_ident())
        return pack_group(group, *codec)

    async def call(method: str, request: Any) -> Any:
        sent.append(request.completions[0].group if method == "complete" else request.group)
        result = pb.CompletionResult(recorded=True)
        return pb.CompleteTasksResponse(results=[result])

    monkeypatch.setattr(worker, "pack_group", packing)
    stub = SimpleNamespace(CompleteTasks="complete", RejectTask="reject")
    connection: Any = SimpleNamespace(stub=stub, call=call)
    client = BufferWorker(connection)
    group = make_group("a", samples=1, length=tokens)
    if end == "complete":
        assert await client.complete_task("a", 1, group, "w")
    else:
        await client.reject_task("a", 1, "why", group)
    await client.close()
    [thread], [packed] = threads, sent
    assert (thread != threading.get_ident()) == beside
    [found] = unpack_group(packed).trajectories
    assert len(found.input_ids) == tokens
