"""What a client does when a service is away, or frozen, for a while. Over a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.ledger_support import make_group

from areal.clients.buffer import BufferClient, TakeState
from areal.errors import Unavailable, WaitTimeout
from areal.protocol.trajectories import pack_group
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import buffer_service_pb2_grpc as pb_grpc


class Flaky(pb_grpc.BufferServiceServicer):
    """Answers as told, one after the other: "frozen" (forever), "away", "full", or well."""

    def __init__(self) -> None:
        self.moods: list[str] = []
        self.calls = 0

    async def _mood(self, context: grpc.aio.ServicerContext) -> None:
        self.calls += 1
        mood = self.moods.pop(0) if self.moods else "well"
        if mood == "frozen":
            await asyncio.Event().wait()
        if mood == "away":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Redis is away")
        if mood == "full":  # as gRPC itself does when thousands of calls wait
            await context.abort(grpc.StatusCode.CANCELLED)

    async def TakeBatch(self, request: pb.TakeBatchRequest, context: grpc.aio.ServicerContext):
        await self._mood(context)
        return pb.TakeBatchResponse(state=pb.TAKE_STATE_WAITING)

    async def GetStats(self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext):
        await self._mood(context)
        return pb.GetStatsResponse(submitted=7)

    async def FetchGroups(self, request: pb.FetchGroupsRequest, context: grpc.aio.ServicerContext):
        await self._mood(context)
        yield pb.FetchGroupsResponse(groups=[pack_group(make_group(request.task_ids[0]))])


@pytest.fixture
async def service() -> AsyncIterator[tuple[Flaky, BufferClient]]:
    flaky, server = Flaky(), grpc.aio.server()
    pb_grpc.add_BufferServiceServicer_to_server(flaky, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = BufferClient(f"127.0.0.1:{port}")
    yield flaky, client
    await client.close()
    await server.stop(0)


async def test_call_when_the_service_froze_then_tried_again_within_retry_for(
    service: tuple[Flaky, BufferClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky, client = service
    monkeypatch.setattr("areal.clients.buffer_trainer.LONG_POLL_MARGIN_S", 2.0)
    flaky.moods = ["frozen", "away", "well"]
    taken = await client.take_batch(1, 1, 0.0, retry_for=30.0)
    assert taken.state is TakeState.WAITING
    assert flaky.calls == 3


async def test_call_when_the_server_drops_it_then_tried_again_within_retry_for(
    service: tuple[Flaky, BufferClient],
) -> None:
    flaky, client = service
    flaky.moods = ["full", "well"]
    assert (await client.get_stats(retry_for=30.0)).submitted == 7
    flaky.moods = ["full"]
    with pytest.raises(Unavailable, match="GetStats on "):
        await client.get_stats()


async def test_fetch_when_the_service_froze_then_tried_again_within_retry_for(
    service: tuple[Flaky, BufferClient],
) -> None:
    flaky, client = service
    flaky.moods = ["frozen", "well"]
    groups = await client.fetch_groups(1, 1, ["a"], timeout=2.0, retry_for=30.0)
    assert [group.group_id for group in groups] == ["a"]


async def test_call_when_nothing_is_to_be_retried_then_fails_at_once(
    service: tuple[Flaky, BufferClient],
) -> None:
    flaky, client = service
    flaky.moods = ["away"]
    with pytest.raises(Unavailable, match="Redis is away"):
        await client.get_stats()
    flaky.moods = ["frozen"]
    with pytest.raises(WaitTimeout, match="GetStats"):
        await client.get_stats(timeout=0.3)
    assert flaky.calls == 2


async def test_call_when_the_client_is_patient_then_every_call_is_tried_again(
    service: tuple[Flaky, BufferClient],
) -> None:
    """The trainer: a service that is being restarted must not end it."""
    flaky, client = service
    client.patience_s = 30.0
    flaky.moods = ["away", "frozen", "well"]
    assert (await client.get_stats(timeout=2.0)).submitted == 7
    assert flaky.calls == 3
