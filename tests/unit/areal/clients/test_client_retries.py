"""What a client does when a service is away, or frozen, for a while. Over a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.buffer_client import BufferClient
from tests.ledger_support import make_group
from tests.waiting import until

from areal.errors import ArealError, Unavailable, WaitTimeout
from areal.protocol.leases import TakeState
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

    async def LeaseTasks(self, request: pb.LeaseTasksRequest, context: grpc.aio.ServicerContext):
        await self._mood(context)
        return pb.LeaseTasksResponse()

    async def FetchGroups(self, request: pb.FetchGroupsRequest, context: grpc.aio.ServicerContext):
        await self._mood(context)
        yield pb.FetchGroupsResponse(groups=[pack_group(make_group(request.task_ids[0]))])


class Service:
    """The service, and clients of it."""

    def __init__(self, flaky: Flaky, address: str) -> None:
        self.flaky = flaky
        self._address = address
        self._clients: list[BufferClient] = []

    def client(self, **options: float) -> BufferClient:
        self._clients.append(BufferClient(self._address, **options))
        return self._clients[-1]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    flaky, server = Flaky(), grpc.aio.server()
    pb_grpc.add_BufferServiceServicer_to_server(flaky, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    opened = Service(flaky, f"127.0.0.1:{port}")
    yield opened
    await opened.close()
    await server.stop(0)


async def test_call_when_the_service_froze_then_tried_again_as_its_policy_says(
    service: Service,
) -> None:
    service.flaky.moods = ["frozen", "away", "well"]
    taken = await service.client(timeout_s=2.0).take_batch(1, 1, 0.0)
    assert taken.state is TakeState.WAITING
    assert service.flaky.calls == 3


async def test_call_when_the_server_drops_it_then_tried_again_as_the_client_says(
    service: Service,
) -> None:
    service.flaky.moods = ["full", "well"]
    assert (await service.client(retry_s=30.0).get_stats()).submitted == 7
    service.flaky.moods = ["full"]
    with pytest.raises(Unavailable, match="GetStats on "):
        await service.client().get_stats()


async def test_fetch_when_the_service_froze_then_tried_again_as_its_policy_says(
    service: Service,
) -> None:
    service.flaky.moods = ["frozen", "well"]
    groups = await service.client(timeout_s=2.0).fetch_groups(1, 1, ["a"])
    assert [group.task_id for group in groups] == ["a"]


async def test_call_when_nothing_is_to_be_retried_then_fails_at_once(service: Service) -> None:
    service.flaky.moods = ["away"]
    with pytest.raises(Unavailable, match="Redis is away"):
        await service.client().get_stats()
    service.flaky.moods = ["frozen"]
    with pytest.raises(WaitTimeout, match="GetStats"):
        await service.client(timeout_s=0.3).get_stats()
    assert service.flaky.calls == 2


async def test_call_when_the_client_is_patient_then_every_call_is_tried_again(
    service: Service,
) -> None:
    """The trainer: a service that is being restarted must not end it."""
    service.flaky.moods = ["away", "frozen", "well"]
    assert (await service.client(timeout_s=2.0, retry_s=30.0).get_stats()).submitted == 7
    assert service.flaky.calls == 3


async def test_call_when_it_may_not_be_made_twice_then_no_client_retries_it(
    service: Service,
) -> None:
    """A lease whose answer was lost is held by no one until it expires."""
    service.flaky.moods = ["away", "well"]
    with pytest.raises(Unavailable, match="Redis is away"):
        await service.client(retry_s=30.0).lease_tasks("w", 1, 0.0)
    assert service.flaky.calls == 1


async def test_close_when_a_call_waits_for_its_answer_then_that_call_ends_with_one_line(
    service: Service,
) -> None:
    service.flaky.moods = ["frozen"] * 3
    client = service.client(timeout_s=30.0)
    call = asyncio.create_task(client.get_stats())
    await until(lambda: service.flaky.calls > 0)
    await client.close()
    with pytest.raises(ArealError, match=r"^GetStats on .*: this client is closed$"):
        await asyncio.wait_for(call, 10.0)


async def test_call_when_its_task_is_cancelled_then_cancelled_although_the_client_closes(
    service: Service,
) -> None:
    service.flaky.moods = ["frozen"]
    client = service.client(timeout_s=30.0)
    call = asyncio.create_task(client.get_stats())
    await until(lambda: service.flaky.calls > 0)
    call.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_close_when_a_call_is_being_retried_then_that_call_ends_with_one_line(
    service: Service,
) -> None:
    """A trainer that fails closes its clients while a thread still asks the ledger."""
    service.flaky.moods = ["away"] * 99
    client = service.client(retry_s=30.0)
    call = asyncio.create_task(client.get_stats())
    await until(lambda: service.flaky.calls > 0)
    await client.close()
    with pytest.raises(ArealError, match=r"^GetStats on .*: this client is closed$"):
        await asyncio.wait_for(call, 10.0)
    with pytest.raises(ArealError, match=r"^FetchGroups on .*: this client is closed$"):
        await client.fetch_groups(1, 1, ["a"])
