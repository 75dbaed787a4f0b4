"""Nonsense for the weight store's HTTP and the sidecar's: refused with a line, never with a 500."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.grpc_fuzz import fuzz_budget  # noqa: F401 - a fixture
from tests.http_fuzz import fuzz_route, fuzz_socket
from tests.ports import free_port

from areal.security import Security
from areal.weights.sidecar import Sidecar
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.weights import WeightStore

pytestmark = pytest.mark.usefixtures("fuzz_budget")

NAME = "v00000001-inc1"
MANIFEST = {
    "version": 1,
    "incarnation": 1,
    "path": "x",
    "files": [{"name": "model.safetensors", "size_bytes": 1000, "digest": "0" * 32}],
    "tensors": [{"name": "a", "shape": [2, 2], "dtype": "F32", "digest": "0" * 32}],
    "delta": None,
    "publish_time": 1.0,
}
SHORT = 15


@asynccontextmanager
async def _sidecar(folder: Path) -> AsyncIterator[str]:
    runner = web.AppRunner(Sidecar(folder, Security()).application())
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def test_store_when_fuzzed_then_no_server_error(tmp_path: Path) -> None:
    app = StoreApp(WeightStore(tmp_path, tmp_path), list, lambda: None, Security())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    await app.start("127.0.0.1", port)
    try:
        problems = []
        for method, path in (
            ("POST", f"/versions/{NAME}"),
            ("POST", f"/versions/{NAME}/commit"),
            ("PUT", f"/versions/{NAME}/model.safetensors"),
            ("PUT", "/versions/%00/%00"),
            ("PUT", f"/versions/{NAME}/{'a' * 300}"),
            ("GET", f"/versions/{NAME}/%00"),
            ("GET", f"/versions/v{'9' * 300}-inc1"),
            ("GET", "/versions/..%2f..%2fetc/passwd"),
        ):
            # 507: there is no room for what a manifest announces.
            problems.append(
                await asyncio.to_thread(fuzz_route, url, method, path, MANIFEST, SHORT, [507])
            )
        problems.append(await asyncio.to_thread(fuzz_socket, url, SHORT))
        async with aiohttp.ClientSession(url) as http:
            for body in (b"[" * 100_000, b'{"version": 1e999, "files": [], "tensors": []}'):
                async with http.post(f"/versions/{NAME}", data=body) as answer:
                    assert answer.status == 400, await answer.text()
            for file in ("a" * 300, "%00"):
                headers = {"Content-Range": "bytes 0-0/1"}
                async with http.post(f"/versions/{NAME}", json=MANIFEST):
                    pass
                path = f"/versions/{NAME}/{file}"
                async with http.put(path, data=b"x", headers=headers) as answer:
                    assert answer.status == 404, await answer.text()
            for bad in ("a\x00b", "half \ud800", "a/b", ".hidden", "a" * 300):
                named = {**MANIFEST, "files": [{**MANIFEST["files"][0], "name": bad}]}
                async with http.post(f"/versions/{NAME}", json=named) as answer:
                    assert answer.status == 400, (bad, await answer.text())
    finally:
        await app.close()
    assert not any(problems), problems


@pytest.mark.parametrize(
    "source",
    [
        f"http://127.0.0.1:x/versions/{NAME}",
        f"http://127.0.0.1:99999/versions/{NAME}",
        f"http://[::1/versions/{NAME}",
        f"http://\x00/versions/{NAME}",
        f"http://\u00e4..\u00fc/versions/{NAME}",
        f"file:///etc/passwd/versions/{NAME}",
        f"http://127.0.0.1:1/versions/{NAME}/../x",
    ],
)
async def test_sidecar_when_its_source_is_nonsense_then_400(tmp_path: Path, source: str) -> None:
    body = {"model_path": source}
    async with (
        _sidecar(tmp_path) as url,
        aiohttp.ClientSession(url) as http,
        http.post("/stage_weights", json=body) as answer,
    ):
        assert answer.status == 400, await answer.text()
        assert (await answer.json())["success"] is False


async def test_sidecar_when_fuzzed_then_no_server_error(tmp_path: Path) -> None:
    async with _sidecar(tmp_path) as url:
        problem = await asyncio.to_thread(
            fuzz_route, url, "POST", "/stage_weights", {"model_path": "http://127.0.0.1:1"}, SHORT
        )
        async with (
            aiohttp.ClientSession(url) as http,
            http.post("/stage_weights", data=b"[" * 50_000) as answer,
        ):
            assert answer.status == 400
    assert not problem
