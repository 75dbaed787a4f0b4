"""`stream` as users run it: no shared folder is named to anybody, every process is real."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file
from tests.integration.weight_sync_rig import Process, WeightSyncRig, generate, inference
from tests.nats_server import NatsServer
from tests.redis_server import RedisServer

from areal.cli_versions import list_versions
from areal.engines.publishing import host_tensors
from areal.models.tiny import make_tiny_model
from areal.servers import ServerState
from areal.transports.base import NewVersion
from areal.transports.chain import DeltaChain
from areal.transports.stream import StreamPublisher
from areal.weights import PolicyVersion


@pytest.mark.slow
async def test_stream_when_versions_follow_each_other_then_servers_serve_each_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    model = tmp_path / "model"
    make_tiny_model(model, seed=0)
    redis, nats = RedisServer(tmp_path / "redis"), NatsServer(tmp_path / "nats")
    async with AsyncExitStack() as stack:
        for store in (redis, nats):
            store.start()
            stack.callback(store.kill)
        rig = WeightSyncRig(
            tmp_path, redis.url, nats.url, model, probe_interval_s=0.2, transport="stream"
        )
        stack.push_async_callback(rig.close)
        # As a server without a volume starts: its model comes from the store, which is not up yet.
        fetch = Process(
            tmp_path / "fetch.log",
            "areal.transports.fetch",
            *(f"{rig.store}/versions/v00000000-inc0", str(tmp_path / "fetched")),
        )
        fetch.start()
        stack.callback(fetch.kill)
        await rig.started()
        assert await asyncio.to_thread(fetch.wait, 60) == 0, fetch.log
        engine, url = inference(tmp_path, tmp_path / "fetched", "inference-0")
        engine.start()
        stack.callback(engine.stop)
        await rig.client.register_server(url)
        await rig.until(url, ServerState.SERVING, 0)

        published: list[PolicyVersion] = []
        tensors = load_file(model / "model.safetensors")
        publisher = StreamPublisher(rig.store, {}, 10.0, chain=DeltaChain())

        def publish(version: int) -> None:
            for tensor in tensors.values():  # few elements, so that later versions are deltas
                tensor.view(-1)[version::50] += 0.01
            copies = [(name, tensor.clone()) for name, tensor in tensors.items()]
            publisher.publish(NewVersion(version, 1, host_tensors(copies), model), published.append)

        async with aiohttp.ClientSession() as session:
            running = asyncio.create_task(generate(session, url, 400, 0))
            for version in (1, 2, 3):
                await asyncio.to_thread(publish, version)
                await rig.client.publish_version(published[-1])
                await rig.until(url, ServerState.SERVING, version)
            spans = (await running)["meta_info"]["weight_versions"]
            assert spans[0]["version"] == "0"
            assert spans[-1]["end"] == 400
            async with session.post(
                f"{url}/weights_checker", json={"action": "checksum"}
            ) as answer:
                sums = (await answer.json())["ranks"][0]["checksums"]
        assert sums == {tensor.name: tensor.digest for tensor in published[-1].tensors}
        assert "transport_fell_back" not in rig.process.log
        # The server that held version 1 read of the others only what changed.
        assert [version.delta is not None for version in published] == [False, True, True]
        assert engine.log.count("delta_applied") == 2
        assert "delta_unusable" not in engine.log

        kept = await rig.client.list_versions()
        assert [version.version for version in kept] == [0, 1, 2, 3]
        assert kept[-1].tensors == published[-1].tensors
        capsys.readouterr()  # what was logged
        # From a machine that has neither the run folder nor the weights.
        assert await asyncio.to_thread(list_versions, None, endpoint=rig.address, as_json=True) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(row["name"], row["encoding"]) for row in rows][-1] == ("v00000003-inc1", "delta")
        assert rows[-1]["served_by"] == [url.removeprefix("http://")]
