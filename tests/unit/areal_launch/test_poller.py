"""The poller against real gRPC servers with hand-written servicers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.waiting import until

from areal.config.services import EndpointsConfig
from areal.security import Security
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
from areal_launch.view import poller as poller_module
from areal_launch.view.live_view import facts
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
    url, state, cause = "http://127.0.0.1:1", policy_pb2.SERVER_STATE_SERVING, ""

    async def ListServers(self, request: Any, context: Any) -> Any:
        server = policy_pb2.InferenceServer(
            server_id="a:1", url=self.url, state=self.state, version=5, cause=self.cause
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
        self.more: dict[str, float] = {}

    async def GetStatus(self, request: Any, context: Any) -> Any:
        rows = [
            trainer_service_pb2.StepRow(
                step=step,
                metrics_json=json.dumps({"step": step, "reward/mean": reward, **self.more}),
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


async def test_notices_when_conversations_split_in_many_steps_then_told_once(
    upstream: tuple[Upstream, EndpointsConfig],
) -> None:
    service, endpoints = upstream
    service.trainer.more = {"rollout/splits": 3, "samples": 8, "train/loss": 0.1}
    service.trainer.more |= {"rollout/splits/content": 2, "rollout/splits_message": 0}
    poller = StackPoller(endpoints, interval_s=0.02)
    told: list[str] = []
    poller.listen_notices(told.append)
    poller.start()
    async with asyncio.timeout(60):
        await until(lambda: len(told) == 1, "a notice")
        service.trainer.rewards = [*service.trainer.rewards, 0.4]
        await until(lambda: len(poller.snapshot.rows) == 4, "rows")
    await poller.close()
    [line] = told
    assert line.startswith("step 3: 3 of 8 trajectories repeat the history of an earlier one")
    assert "changed content of a message (the earliest is messages[0])" in line


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
    first = await poller.refresh()
    assert first.samples_per_s is None
    assert first.tokens_per_s is None
    assert "generated" not in facts(first)  # `areal status` looks once
    apart = time.monotonic()
    await asyncio.sleep(0.1)
    apart = time.monotonic() - apart
    rate = (await poller.refresh()).tokens_per_s
    assert rate is not None
    assert "generated" in facts(poller.snapshot)
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


async def test_poll_when_answers_are_long_then_the_speed_is_what_the_servers_say(
    upstream: tuple[Upstream, EndpointsConfig],
) -> None:
    """The ledger counts tokens when a group ends: for minutes a run looked as if it hung."""
    asked: list[str] = []

    async def loads(request: web.Request) -> web.Response:
        asked.append(request.headers["Authorization"])
        each = {"num_running_reqs": 12, "gen_throughput": 45.25}
        return web.json_response({"loads": [each, each]})

    app = web.Application()
    app.router.add_get("/v1/loads", loads)
    service, endpoints = upstream
    async with TestServer(app) as server:
        service.weights.url = str(server.make_url("/")).rstrip("/")
        poller = StackPoller(endpoints, Security(token="0123456789abcdef"))
        snapshot = await poller.refresh()
        await poller.close()
    assert snapshot.generating == (24, 90.5)
    assert facts(snapshot)["generating"] == "90 tokens/s in 24 requests"
    assert asked == ["Bearer 0123456789abcdef"]


@pytest.mark.parametrize(
    "answer", ['{"loads": [{"num_running_reqs": 1}]}', '{"loads": 3}', "[]", "<html>", "\ud800"]
)
async def test_poll_when_a_server_does_not_tell_its_speed_then_it_is_left_out(
    upstream: tuple[Upstream, EndpointsConfig], answer: str
) -> None:
    async def loads(_: web.Request) -> web.Response:
        body = answer.encode(errors="surrogatepass")
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/loads", loads)
    service, endpoints = upstream
    async with TestServer(app) as server:
        service.weights.url = str(server.make_url("/")).rstrip("/")
        poller = StackPoller(endpoints)
        snapshot = await poller.refresh()
        await poller.close()
    assert snapshot.generating is None
    assert "generating" not in facts(snapshot)
    assert snapshot.problems == {}


async def test_poll_when_a_server_is_quarantined_then_one_line_a_minute_names_the_cause(
    upstream: tuple[Upstream, EndpointsConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, endpoints = upstream
    poller = StackPoller(endpoints)
    lines: list[str] = []
    poller.listen_servers(lines.append)
    clock = [1000.0]
    monkeypatch.setattr(poller_module.time, "monotonic", lambda: clock[0])

    async def look(state: int, cause: str, now: float) -> int:
        service.weights.state, service.weights.cause, clock[0] = state, cause, now
        await poller._poll_weights(poller._weights)
        return len(lines)

    quarantined, serving = policy_pb2.SERVER_STATE_QUARANTINED, policy_pb2.SERVER_STATE_SERVING
    try:
        assert await look(serving, "", 0.0) == 0
        assert await look(quarantined, "in one step for 61 s", 1.0) == 1
        assert await look(quarantined, "in one step for 63 s", 3.0) == 1
        assert await look(serving, "", 10.0) == 1
        assert await look(quarantined, "refused", 20.0) == 1  # told less than a minute ago
        assert await look(quarantined, "refused", 62.0) == 2
        assert await look(quarantined, "refused", 1000.0) == 2  # it never left
    finally:
        await poller.close()
    assert lines == [
        "server a:1 is quarantined: in one step for 61 s",
        "server a:1 is quarantined: refused",
    ]
