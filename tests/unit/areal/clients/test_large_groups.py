"""A large group is packed beside the event loop, which other sessions need."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.ledger_support import make_group

from areal.clients.buffer import worker
from areal.clients.buffer.worker import BufferWorker
from areal.protocol import routes
from areal.protocol.trajectories import pack_group, unpack_group
from areal.types import TrajectoryGroup
from areal.v1 import buffer_service_pb2 as pb


@pytest.mark.parametrize("end", ["complete", "reject"])
@pytest.mark.parametrize(
    ("tokens", "routed", "beside"),
    [(100, 0, False), (worker._LARGE, 0, True), (100, 1000, False), (100, 3_000_000, True)],
)
async def test_group_when_it_is_large_then_it_is_packed_beside_the_loop(
    end: str, tokens: int, routed: int, beside: bool, monkeypatch: pytest.MonkeyPatch
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
    if routed:  # bytes of 10 tokens
        group.trajectories[0].routed_experts = np.zeros((10, routed // 80, 8), np.uint8)
    if end == "complete":
        assert await client.complete_task("a", 1, group, "w")
    else:
        await client.reject_task("a", 1, "why", group)
    await client.close()
    [thread], [packed] = threads, sent
    assert (thread != threading.get_ident()) == beside
    [found] = unpack_group(packed).trajectories
    assert len(found.input_ids) == tokens


async def test_routes_when_groups_have_too_many_then_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = list[bytes]()

    async def call(_: str, request: Any) -> Any:
        sent.extend(each.group for each in request.completions)
        return pb.CompleteTasksResponse(results=[pb.CompletionResult(recorded=True)])

    monkeypatch.setattr(routes, "MAX_BYTES", 2 << 20)
    connection: Any = SimpleNamespace(stub=SimpleNamespace(CompleteTasks=""), call=call)
    connection.stub.ReturnTasks = ""
    client = BufferWorker(connection)
    with capture_logs() as logs:
        for name, layers in (("a", 1 << 18), ("b", (1 << 18) + 1), ("c", 1 << 19)):
            group = make_group(name, samples=1, length=10)
            group.trajectories[0].routed_experts = np.zeros((1, layers, 8), np.uint8)
            assert await client.complete_task(name, 1, group, "w")
    await client.close()
    [line] = [each for each in logs if each["event"] == "routes_missing"]
    assert "task 'b' take 2 MiB, more than 2" in line["cause"]
    assert "gconfig.n_samples" in line["cause"]
    assert "rollout.router_replay=false" in line["cause"]
    found = [unpack_group(each).trajectories[0].routed_experts for each in sent]
    assert [each is None for each in found] == [False, True, True]
