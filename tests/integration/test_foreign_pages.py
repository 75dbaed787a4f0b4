"""What a web page of somebody else can reach on a stack without a token: nothing.

A page in a browser on this machine may send simple requests (text/plain, no CORS) anywhere, and its
own name may be made to resolve to 127.0.0.1. So each server without a token looks at what a
browser says of itself.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.inference_server import make_model, running_server
from tests.ports import free_port
from tests.service_process import service_process

from areal.security import Security
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.weights import WeightStore

FOREIGN = [
    {"Host": "evil.example:80"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


async def refused(url: str, method: str = "GET") -> None:
    """Of each foreign request 403 with a reason; the same from here is not refused so."""
    async with aiohttp.ClientSession() as http:
        for headers in FOREIGN:
            async with http.request(method, url, headers=headers) as reply:
                assert reply.status == 403, (url, headers, await reply.text())
                assert "without a token" in await reply.text()
        port = urlsplit(url).port
        ours = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
        for headers in ({}, ours, {"Sec-Fetch-Site": "same-origin"}):
            async with http.request(method, url, headers=headers) as reply:
                assert reply.status != 403, (url, headers, await reply.text())


async def test_gateway_when_a_foreign_page_asks_then_refused(tmp_path: Path) -> None:
    async with service_process("areal_gateway", tmp_path, "experiment_name: foreign\n") as service:
        await refused(f"http://{service.listen}/v1/status")
        await refused(f"http://{service.listen}/v1/tasks", "POST")
        await refused(f"http://{service.metrics}/waits")


async def test_weight_store_when_a_foreign_page_asks_then_refused(tmp_path: Path) -> None:
    app = StoreApp(WeightStore(tmp_path, tmp_path), list, lambda: None, Security())
    port = free_port()
    await app.start("127.0.0.1", port)
    try:
        await refused(f"http://127.0.0.1:{port}/versions/v00000001-inc1")
    finally:
        await app.close()


async def test_inference_when_a_foreign_page_posts_then_nothing_is_done(tmp_path: Path) -> None:
    make_model(tmp_path)
    with running_server(tmp_path) as server:
        url = server.url
        await refused(f"{url}/get_model_info")
        await refused(f"{url}/pause_generation", "POST")
        # The only body that a page may send unasked.
        plain = {"Content-Type": "text/plain"}
        async with aiohttp.ClientSession(url, headers=plain) as http:
            for path in ("/pause_generation", "/abort_request", "/generate"):
                async with http.post(path, data=b'{"input_ids": [2]}') as reply:
                    assert reply.status == 400
                    assert "expected application/json" in await reply.text()


@pytest.mark.parametrize("headers", [{"host": "weights.example"}, {"origin": "http://x"}])
def test_security_when_there_is_a_token_then_a_page_cannot_know_it(headers: dict[str, str]) -> None:
    assert Security().foreign(headers.get)
    assert not Security(token="0123456789abcdef").foreign(headers.get)
    assert not Security(allow_insecure_bind=True).foreign(headers.get)


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80", "10.0.0.7:9", "LOCALHOST", ""],
)
def test_security_when_the_host_is_no_strangers_name_then_let_in(host: str) -> None:
    assert Security().foreign({"host": host}.get) == ""
