"""`stream` as users run it: no shared folder is named to anybody, every process is real."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file
from tests.integration.weight_sync_rig import Process, generate, inference, rig_with_stores

from areal.security import Security
from areal.weights.delta import DeltaChain
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import NewVersion
from areal.weights.servers import ServerState
from areal_launch.commands.versions import list_versions
from areal_torch.engines.export.publishing import host_tensors
from areal_torch.publish.stream import StreamPublisher


async def test_stream_when_versions_follow_each_other_then_servers_serve_each_in_place(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        rig_with_stores(tmp_path, tiny_model, transport="stream") as rig,
        AsyncExitStack() as stack,
    ):
        # As a server without a volume starts: its model comes from the store, which is not up yet.
        fetch = Process(
            tmp_path / "fetch.log",
            "areal.weights.fetch",
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
        tensors = load_file(tiny_model / "model.safetensors")
        publisher = StreamPublisher(rig.store, Security(), 10.0, chain=DeltaChain())

        def publish(version: int) -> None:
            for tensor in tensors.values():  # few elements, so that later versions are deltas
                tensor.view(-1)[version::50] += 0.01
            copies = [(name, tensor.clone()) for name, tensor in tensors.items()]
            publisher.publish(
                NewVersion(version, 1, host_tensors(copies), tiny_model), published.append
            )

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
