"""`weight_sync.path=s3://…` as users run it: the service, an engine and the S3 server are real."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file
from tests.integration.weight_sync_rig import inference, rig_with_stores
from tests.s3_server import BUCKET, start_s3
from tests.waiting import until

from areal.weights.manifest import PolicyVersion
from areal.weights.objects import ObjectPublisher, ObjectStore
from areal.weights.publisher import NewVersion
from areal.weights.servers import ServerState
from areal_torch.engines.export.publishing import host_tensors

URL = f"s3://{BUCKET}/run"


async def test_object_store_when_versions_follow_each_other_then_servers_serve_each_in_place(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        stack.enter_context(start_s3(tmp_path / "s3", monkeypatch))
        rig = await stack.enter_async_context(
            rig_with_stores(tmp_path, tiny_model, path=URL, keep=1)
        )
        await rig.started()
        engine, url = inference(tmp_path, tiny_model, "inference-0")
        engine.start()
        stack.callback(engine.stop)
        await rig.client.register_server(url)
        await rig.until(url, ServerState.SERVING, 0)

        published: list[PolicyVersion] = []
        tensors = load_file(tiny_model / "model.safetensors")

        def upload(version: int) -> None:
            for tensor in tensors.values():
                tensor += 1e-3 * version
            copies = [(name, tensor.clone()) for name, tensor in tensors.items()]
            new = NewVersion(version, 1, host_tensors(copies), tiny_model)
            ObjectPublisher(URL).publish(new, published.append)

        async def publish(version: int) -> None:
            await asyncio.to_thread(upload, version)
            await rig.client.publish_version(published[-1])

        for version in (1, 2, 3):
            await publish(version)
            await rig.until(url, ServerState.SERVING, version)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/weights_checker", json={"action": "checksum"}) as answer,
        ):
            sums = (await answer.json())["ranks"][0]["checksums"]
        assert sums == {tensor.name: tensor.digest for tensor in published[-1].tensors}
        assert "transport_fell_back" not in rig.process.log
        # Version 1 goes once all servers have left it.
        store = ObjectStore(URL)
        kept = ["v00000002-inc1", "v00000003-inc1"]
        await until(
            lambda: store.names() == kept, "old versions to go", 60, lambda: str(store.names())
        )
        assert [v.version for v in await rig.client.list_versions()] == [0, 2, 3]

        # A flipped bit is found by the server that reads it, and the next version heals.
        await asyncio.to_thread(upload, 4)
        raw = bytearray(published[-1].files[1].size_bytes)
        file = "v00000004-inc1/model.safetensors"
        await asyncio.to_thread(store.read_into, *file.split("/"), 0, memoryview(raw))
        raw[-3] ^= 1
        await asyncio.to_thread(store.put, file, bytes(raw))
        await rig.client.publish_version(published[-1])
        await rig.until(url, ServerState.QUARANTINED, cause="has digest")
        await publish(5)
        await rig.until(url, ServerState.SERVING, 5)
        for log in (rig.process.log, engine.log):
            assert "secret-test" not in log
