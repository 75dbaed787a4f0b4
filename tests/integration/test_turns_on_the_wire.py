"""Servers sleep and wake over the wire: the service as a process, a real engine, a real Redis."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.integration.weight_sync_rig import WeightSyncRig, generate, inference, rig_with_stores

from areal.errors import InvalidInput, StaleIncarnation
from areal.v1 import weight_sync_service_pb2 as pb
from areal.v1 import weight_sync_service_pb2_grpc as pb_grpc
from areal.weights.servers import ServerState

pytestmark = pytest.mark.timeout(300)
SERVING = ServerState.SERVING


async def released(url: str) -> list[str] | None:
    """What a server's memory lacks; None: it does not answer."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/server_info") as answer:
            if answer.status != 200:
                return None
            [state] = (await answer.json())["internal_states"]
            return list(state["released"])
    except aiohttp.ClientError:
        return None


async def hold(rig: WeightSyncRig, incarnation: int = 1, lease_s: float = 30.0) -> None:
    """Until all sleep."""
    async with asyncio.timeout(90):
        while await rig.client.hold_servers(incarnation, lease_s=lease_s):
            pass


async def test_turn_when_server_trainer_or_weight_sync_dies_in_it_then_servers_sleep_and_wake(
    tmp_path: Path, tiny_model: Path
):
    gone = ["kv_cache", "weights"]
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(
            rig_with_stores(tmp_path, tiny_model, allocation_mode="sglang:d1|fsdp:d1@alternating")
        )
        await rig.started()
        process, url = inference(tmp_path, tiny_model, "inference-0")
        process.start()
        stack.callback(process.kill)
        await rig.client.register_server(url)
        await rig.until(url, SERVING, 0)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        running = asyncio.create_task(generate(session, url, 900, 0))
        await hold(rig)
        assert await released(url) == gone
        info = (await running)["meta_info"]
        assert info["finish_reason"]["type"] == "abort"
        assert {span["version"] for span in info["weight_versions"]} <= {"0"}

        await rig.publish(1)
        process.kill()  # the server dies asleep: there is no memory to wait for
        await hold(rig)
        process.start()  # and one that comes back in the turn sleeps, too
        async with asyncio.timeout(90):
            while await released(url) != gone:
                await hold(rig)

        rig.process.kill()
        rig.process.start()
        await rig.client.wait_for("version 1", lambda s: s.current_version == 1, timeout=60)
        await hold(rig, lease_s=2.0)
        assert await released(url) == gone
        # The trainer has died: its lease ends, and the server has the newest version.
        await rig.until(url, SERVING, 1)
        assert await released(url) == []
        answer = await generate(session, url, 4, 1)
        assert {span["version"] for span in answer["meta_info"]["weight_versions"]} == {"1"}


MALFORMED = [
    (pb.HoldServersRequest(), "lease: missing"),
    (pb.HoldServersRequest(incarnation=5), "lease: missing"),
    (pb.HoldServersRequest(lease=Duration(seconds=10)), "incarnation 0: expected 1 or more"),
    (
        pb.HoldServersRequest(incarnation=-3, lease=Duration(seconds=10)),
        "incarnation -3: expected 1 or more",
    ),
    (
        pb.HoldServersRequest(incarnation=5, lease=Duration(seconds=61)),
        "lease 61.0 s: expected 0 to 60 s",
    ),
    (pb.HoldServersRequest(incarnation=5, lease=Duration(seconds=-(2**63))), "expected 0 to 60 s"),
    (
        pb.HoldServersRequest(incarnation=5, lease=Duration(nanos=-1_000_000)),
        "lease -0.001 s: expected 0 to 60 s",
    ),
]


async def test_hold_when_a_request_is_malformed_then_refused_in_one_line_and_servers_stay_awake(
    tmp_path: Path, tiny_model: Path
):
    mode = "sglang:d1|fsdp:d1@alternating"
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(
            rig_with_stores(tmp_path, tiny_model, allocation_mode=mode)
        )
        await rig.started()
        process, url = inference(tmp_path, tiny_model, "inference-0")
        process.start()
        stack.callback(process.kill)
        await rig.client.register_server(url)
        await rig.until(url, SERVING, 0)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(rig.address))
        stub = pb_grpc.WeightSyncServiceStub(channel)
        for request, said in MALFORMED:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.HoldServers(request, timeout=30)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in str(refused.value.details())
            assert "\n" not in str(refused.value.details())
        assert await released(url) == []
        await rig.client.hold_servers(1, lease_s=0.0)  # none of those incarnations counted
        await rig.client.hold_servers(2, lease_s=0.0)
        with pytest.raises(StaleIncarnation):
            await rig.client.hold_servers(1, lease_s=10.0)
        assert (await rig.server(url)).state is SERVING


async def test_hold_when_servers_have_their_own_gpus_then_refused_and_they_serve_on(rig, good):
    _, url = good
    await rig.until(url, SERVING, 0)
    with pytest.raises(InvalidInput, match="alternating"):
        await rig.client.hold_servers(1, lease_s=30.0)
    assert await released(url) == []
    await rig.until(url, SERVING, 0)
