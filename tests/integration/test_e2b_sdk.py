"""The E2B-compatible side of the sandbox service: by its wire, and with E2B's own SDK."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.integration.test_sandbox import REASON
from tests.ports import free_port
from tests.service_process import service_process

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "boxes work")
TOKEN = "0123456789abcdef0123"
# An interpreter that has the SDK (make test-e2b): it and its packages are none of ours.
SDK = os.environ.get("AREAL_TEST_E2B") or (importlib.util.find_spec("e2b") and sys.executable)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    service = service_process(
        "areal_sandbox",
        folder,
        "sandbox: {boxes: 1}",
        f"endpoints.sandbox_http={url}",
        environment={"AREAL_TOKEN": TOKEN},
    )
    async with service:
        yield url


@pytest.mark.skipif(not SDK, reason="no package e2b: `make test-e2b`, or AREAL_TEST_E2B=PYTHON")
async def test_sdk_when_it_is_given_our_url_then_it_works_unchanged(tmp_path):
    async with serving(tmp_path) as url:
        script = str(Path(__file__).with_name("e2b_user.py"))
        process = await asyncio.create_subprocess_exec(
            SDK,
            script,
            url,
            TOKEN,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await asyncio.wait_for(process.communicate(), 200)
        assert process.returncode == 0, said.decode()


async def test_wire_when_a_command_runs_then_its_events_come_in_envelopes(tmp_path):
    async with serving(tmp_path) as url, aiohttp.ClientSession(url) as http:
        async with http.post("/v2/sandboxes", json={"templateID": "base"}) as reply:
            assert reply.status == 401
        key = {"X-API-Key": TOKEN}
        async with http.post("/v2/sandboxes", json={}, headers=key) as reply:
            assert reply.status == 201
            made = await reply.json()
        async with http.post("/sandboxes", json={}, headers=key) as reply:
            assert reply.status == 429
            assert 1 <= int(reply.headers["Retry-After"]) <= 30
        box = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
        async with http.get("/health", headers=box | {"X-Access-Token": "another"}) as reply:
            assert reply.status == 401
        async with http.post("/files?path=a", data=b"\0\1", headers=box) as reply:
            assert await reply.json() == [{"name": "a", "type": "file", "path": "/tmp/a"}]
        start = {"process": {"cmd": "sh", "args": ["-c", "wc -c < a; exit 2"]}, "stdin": False}
        events = await call(http, "/process.Process/Start", start, box)
        assert list(events[0]["event"]) == ["start"]
        assert base64.b64decode(events[1]["event"]["data"]["stdout"]) == b"2\n"
        assert events[2]["event"]["end"]["exitCode"] == 2
        assert events[3] == {}
        events = await call(http, "/process.Process/Start", {"process": {"cmd": "none"}}, box)
        assert events[-1]["error"]["code"] == "invalid_argument"
        async with http.post("/filesystem.Filesystem/Stat", json={"path": "b"}, headers=box) as r:
            assert (r.status, (await r.json())["code"]) == (404, "not_found")
        for nonsense in (b"no json", b"[1]", b'{"path": 3}'):
            async with http.post("/filesystem.Filesystem/Stat", data=nonsense, headers=box) as r:
                assert (r.status, (await r.json())["code"]) == (400, "invalid_argument")
        async with http.delete(f"/sandboxes/{made['sandboxID']}", headers=key) as reply:
            assert reply.status == 204
        async with http.get("/health", headers=box) as reply:
            assert reply.status == 502
            assert "was not found" in (await reply.json())["message"]


async def call(http: aiohttp.ClientSession, path: str, message: dict, headers: dict) -> list[dict]:
    """A server-streaming call: the messages, then the end."""
    body = json.dumps(message).encode()
    data = b"\0" + len(body).to_bytes(4, "big") + body
    answers = []
    async with http.post(path, data=data, headers=headers) as reply:
        assert reply.content_type == "application/connect+json"
        whole = await reply.read()
    while whole:
        size = int.from_bytes(whole[1:5], "big")
        answers.append(json.loads(whole[5 : 5 + size]))
        whole = whole[5 + size :]
    return answers
