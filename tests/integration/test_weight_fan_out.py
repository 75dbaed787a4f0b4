"""Many servers, one version: they pull it from each other."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from safetensors.torch import load_file
from tests.inference_server import make_model
from tests.integration.weight_sync_rig import Process, WeightSyncRig, rig_with_stores
from tests.ports import free_port

from areal.security import Security
from areal.weights.manifest import MANIFEST, PolicyVersion, to_json
from areal.weights.publisher import NewVersion
from areal.weights.servers import ServerState
from areal_torch.engines.export.publishing import host_tensors
from areal_torch.publish.stream import StreamPublisher

SERVERS = 16
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "vocab_size": 131,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of some MB: its bytes are more than everything else that is said."""
    folder = tmp_path_factory.mktemp("model") / "wide"
    make_model(folder, **WIDE)
    return folder


def upload(rig: WeightSyncRig, version: int) -> PolicyVersion:
    """What a trainer does; the version is not announced yet."""
    tensors = load_file(rig.model / "model.safetensors")
    changed = [(name, tensor + 0.001 * version) for name, tensor in tensors.items()]
    published: list[PolicyVersion] = []
    StreamPublisher(rig.store, Security(), 10.0).publish(
        NewVersion(version, 1, host_tensors(changed), rig.model), published.append
    )
    return published[0]


def engines(stack: AsyncExitStack, tmp_path: Path, model: Path, name: str, count: int) -> list[str]:
    """So many servers in a process of their own."""
    ports = [free_port() for _ in range(count)]
    process = Process(
        tmp_path / f"{name}.log", "tests.integration.many_servers", str(model), *map(str, ports)
    )
    process.start()
    stack.callback(process.kill)
    return [f"http://127.0.0.1:{port}" for port in ports]


def given(rig: WeightSyncRig) -> int:
    """Bytes that weight-sync's process has written so far, to sockets and files."""
    assert rig.process._process is not None
    counters = psutil.Process(rig.process._process.pid).io_counters()
    return int(counters.write_chars)


@pytest.mark.long
async def test_version_when_16_servers_take_it_then_weight_sync_writes_one_copy(
    model: Path, tmp_path: Path
) -> None:
    async with (
        rig_with_stores(tmp_path, model, transport="stream") as rig,
        AsyncExitStack() as stack,
    ):
        await rig.started()
        urls = engines(stack, tmp_path, model, "engines", SERVERS)
        for url in urls:
            await rig.client.register_server(url)
        await asyncio.gather(*(rig.until(url, ServerState.SERVING, 0) for url in urls))
        version = await asyncio.to_thread(upload, rig, 1)
        before = given(rig)
        await rig.client.publish_version(version)
        await asyncio.gather(*(rig.until(url, ServerState.SERVING, 1) for url in urls))
        ratio = (given(rig) - before) / version.size_bytes
        print(f"{SERVERS} servers cost weight-sync {ratio:.2f} x the model's bytes")
        assert ratio < 1.2
        assert "transport_fell_back" not in rig.process.log
        assert "giver_failed" not in rig.process.log


class BadGiver:
    """Pulls like a server and gives on something else, or less than it announced."""

    def __init__(self, version: PolicyVersion, *, dies: bool) -> None:
        self._version, self._dies = version, dies
        self.asked = 0
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/versions/{name}/{file}", self._give)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _give(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["file"] == MANIFEST:
            return web.Response(text=to_json(self._version))
        self.asked += 1
        file = Path(self._version.path) / request.match_info["file"]
        raw, wanted = bytearray(file.read_bytes()), request.http_range
        part = raw[wanted.start : wanted.stop]
        if wanted.start >= 8 + int.from_bytes(raw[:8], "little"):  # tensors, not the header
            if self._dies:
                assert request.transport is not None
                request.transport.abort()
            part[-1] ^= 1
        span = f"bytes {wanted.start}-{wanted.stop - 1}/{len(raw)}"
        return web.Response(body=bytes(part), status=206, headers={"Content-Range": span})


@pytest.mark.parametrize("dies", [False, True], ids=["wrong bytes", "dies"])
async def test_version_when_a_giver_fails_then_another_source_and_never_its_bytes(
    model: Path, tmp_path: Path, dies: bool
) -> None:
    """One server that has the version, and lies; the next pulls from it, then from the store."""
    import aiohttp

    from areal_weight_sync.engine.givers import Givers
    from areal_weight_sync.engine.http import HttpEngine, open_session
    from areal_weight_sync.engine.routes import Routes

    async with (
        rig_with_stores(tmp_path, model, transport="stream") as rig,
        AsyncExitStack() as stack,
    ):
        await rig.started()
        (url,) = engines(stack, tmp_path, model, "engine", 1)
        await rig.client.register_server(url)
        await rig.until(url, ServerState.SERVING, 0)
        version = await asyncio.to_thread(upload, rig, 1)
        bad = BadGiver(version, dies=dies)
        await bad.start()
        stack.push_async_callback(bad.stop)
        givers = Givers()
        async with givers.turn(version.folder_name, 1.0) as turn:
            turn.taker = bad.url
        session = await stack.enter_async_context(open_session({}))
        engine = HttpEngine(url, session, routes=Routes(("stream",), rig.store, 1), givers=givers)
        await engine.stage(version, timeout=60.0)
        await engine.load(version, flush_cache=False, timeout=60.0)
        assert bad.asked > 0
        assert not givers.holds(version.folder_name, bad.url)
        assert givers.holds(version.folder_name, url)
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url}/weights_checker", json={"action": "checksum"}) as answer,
        ):
            sums = (await answer.json())["ranks"][0]["checksums"]
        assert sums == {tensor.name: tensor.digest for tensor in version.tensors}
        # What it gives on is the file, to the byte.
        file = next(f for f in version.files if f.name.endswith(".safetensors"))
        async with aiohttp.ClientSession() as client:
            place = f"{url}/versions/{version.folder_name}"
            span = {"Range": f"bytes=0-{file.size_bytes - 1}"}
            async with client.get(f"{place}/{file.name}", headers=span) as answer:
                assert answer.status == 206
                assert await answer.read() == (Path(version.path) / file.name).read_bytes()
            async with client.get(f"{url}/versions/v00000009-inc1/{MANIFEST}") as answer:
                assert answer.status == 404
                assert "not held here" in json.loads(await answer.text())["error"]
            async with client.get(f"{place}/{file.name}") as answer:
                assert answer.status == 416
