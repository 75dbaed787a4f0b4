"""The poller against real gRPC servers with hand-written servicers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tests.waiting import until

from areal.config.services import EndpointsConfig
from areal.types import TaskState
from areal.v1 import (
    buffer_service_pb2,
    buffer_service_pb2_grpc,
    policy_pb2,
    trainer_service_pb2,
    trainer_service_pb2_grpc,
    trajectory_pb2,
    weight_sync_service_pb2,
    weight_sync_service_pb2_grpc,
)
from areal.weights.servers import ServerState
from areal_launch.view.poller import StackPoller


class Buffer(buffer_service_pb2_grpc.BufferServiceServicer):
    def __init__(self) -> None:
        self.tokens = 0

    async def GetStats(self, request: Any, context: Any) -> Any:
        self.tokens += 1000
        return buffer_service_pb2.GetStatsResponse(
            submitted=7,
            counts=[
                buffer_service_pb2.StateCount(state=trajectory_pb2.TASK_STATE_QUEUED, tasks=4),
                buffer_service_pb2.StateCount(state=trajectory_pb2.TASK_STATE_TRAINED, tasks=3),
            ],
            staleness_max=2,
            max_head_offpolicyness=2,
            generated_tokens=self.tokens,
        )


class WeightSync(weight_sync_service_pb2_grpc.WeightSyncServiceServicer):
    async def ListServers(self, request: Any, context: Any) -> Any:
        server = policy_pb2.InferenceServer(
            server_id="a:1", url="http://a:1", state=policy_pb2.SERVER_STATE_SERVING, version=5
        )
        return weight_sync_service_pb2.ListServersResponse(servers=[server], current_version=5)

    async def WatchVersions(self, request: Any, context: Any) -> AsyncIterator[Any]:
        response = weight_sync_service_pb2.WatchVersionsResponse(
            confirmed_servers=1, servers=1, confirmed_version=5, updates=5
        )
        response.current.version, response.current.path = 5, "w"
        yield response


class Trainer(trainer_service_pb2_grpc.TrainerServiceServicer):
    def __init__(self) -> None:
        self.incarnation, self.rewards = 1, [0.1, 0.2, 0.3]

    async def GetStatus(self, request: Any, context: Any) -> Any:
        rows = [
            trainer_service_pb2.StepRow(
                step=step, metrics_json=json.dumps({"step": step, "reward/mean": reward})
            )
            for step, reward in enumerate(self.rewards, start=1)
            if step > request.after_step
        ]
        if not rows:
            await asyncio.sleep(min(request.max_wait.ToSeconds(), 0.05))
        return trainer_service_pb2.GetStatusResponse(
            state=trainer_service_pb2.TRAINER_STATE_TRAINING,
            step=len(self.rewards),
            total_steps=10,
            incarnation=self.incarnation,
            rows=rows,
        )


class Upstream:
    """All three services in one server."""

    def __init__(self) -> None:
        self.buffer, self.weights, self.trainer = Buffer(), WeightSync(), Trainer()

    async def start(self) -> EndpointsConfig:
        self.server = grpc.aio.server()
        buffer_service_pb2_grpc.add_BufferServiceServicer_to_server(self.buffer, self.server)
        weight_sync_service_pb2_grpc.add_WeightSyncServiceServicer_to_server(
            self.weights, self.server
        )
        trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(self.trainer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        address = f"127.0.0.1:{port}"
        return EndpointsConfig(buffer=address, weight_sync=address, trainer=address)


@pytest.fixture
async def upstream() -> AsyncIterator[tuple[Upstream, EndpointsConfig]]:
    upstream = Upstream()
    endpoints = await upstream.start()
    yield upstream, endpoints
    await upstream.server.stop(0)


async def test_refresh_when_all_answer_then_snapshot_is_whole(
    upstream: tuple[Upstream, EndpointsConfig],
) -> None:
    poller = StackPoller(upstream[1])
    snapshot = await poller.refresh()
    await poller.close()
    assert snapshot.problems == {}
    assert snapshot.ledger is not None
    assert snapshot.ledger.counts[TaskState.QUEUED] == 4
    assert snapshot.ledger.counts[TaskState.EXPIRED] == 0
    assert snapshot.servers[0].state is ServerState.SERVING
    assert snapshot.sync is not None
    assert snapshot.sync.current_version == 5
    assert [r["reward/mean"] for r in snapshot.rows] == [0.1, 0.2, 0.3]


async def test_poll_when_trainer_restarts_then_repeated_steps_replace_lost_ones(
    upstream: tuple[Upstream, EndpointsConfig],
) -> None:
    service, endpoints = upstream
    poller = StackPoller(endpoints, interval_s=0.02)
    seen: list[dict[str, Any]] = []
    poller.listen(seen.append)
    poller.start()
    async with asyncio.timeout(60):
        await until(lambda: len(poller.snapshot.rows) == 3, "rows")
        service.trainer.incarnation, service.trainer.rewards = 2, [0.1]
        await until(lambda: len(poller.snapshot.rows) == 1, "rows")
        service.trainer.rewards = [0.1, 0.25]
        await until(lambda: len(poller.snapshot.rows) == 2, "rows")
    await poller.close()
    assert [r["reward/mean"] for r in poller.snapshot.rows] == [0.1, 0.25]
    assert [r["step"] for r in seen] == [1, 2, 3, 2]


async def test_poll_when_tokens_grow_then_rate_is_per_second(
    upstream: tuple[Upstream, EndpointsConfig],
) -> None:
    poller = StackPoller(upstream[1])
    began = time.monotonic()
    assert (await poller.refresh()).tokens_per_s == 0
    apart = time.monotonic()
    await asyncio.sleep(0.1)
    apart = time.monotonic() - apart
    rate = (await poller.refresh()).tokens_per_s
    whole = time.monotonic() - began
    await poller.close()
    # Between the looks, which take as long as the machine lets them, 1000 tokens were generated.
    assert 1000 / whole <= rate <= 1000 / apart


async def test_refresh_when_a_service_is_away_then_problem_names_it_and_values_stay(
    upstream: tuple[Upstream, EndpointsConfig],
) -> None:
    service, endpoints = upstream
    poller = StackPoller(endpoints)
    await poller.refresh()
    await service.server.stop(0)
    snapshot = await poller.refresh(timeout=1.0)
    await poller.close()
    assert set(snapshot.problems) == {"buffer", "weight-sync", "trainer"}
    assert snapshot.ledger is not None
    assert snapshot.ledger.submitted == 7


async def test_poll_when_it_fails_of_a_bug_then_the_snapshot_says_that_it_has_ended(
    upstream: tuple[Upstream, EndpointsConfig],
) -> None:
    def fails(_: dict[str, Any]) -> None:
        raise KeyError("reward/mean")

    poller = StackPoller(upstream[1], interval_s=0.02)
    poller.listen(fails)
    poller.start()
    try:
        await until(lambda: "trainer" in poller.snapshot.problems, "the end of the loop")
    finally:
        await poller.close()
    said = poller.snapshot.problems["trainer"]
    assert said == "is no longer polled: KeyError: 'reward/mean'"
