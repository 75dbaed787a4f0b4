"""What code of users may see of the service that runs it: none of its secrets."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import aiohttp
import pytest
from tests.buffer_client import BufferClient
from tests.service_process import service_process

from areal.clients.reward import RewardClient
from areal.protocol.scores import ScoreItem
from areal.security import Security

TOKEN = "correct-horse-battery-staple"
SECRETS = {name: f"{name}-{TOKEN}" for name in ("AREAL_REDIS_PASSWORD", "AREAL_NATS_TOKEN")}
# Looks around, and writes down what it saw.
CURIOUS = """
import json, os

def reward_fn(prompt, completions, prompt_ids, completion_ids, file, **_):
    seen = {"own environment": repr(dict(os.environ))}
    for name in ("environ", "mem"):
        path = f"/proc/{os.getppid()}/{name}"
        try:
            with open(path, "rb") as opened:
                seen[name] = repr(opened.read()) if name == "environ" else "opened"
        except OSError as error:
            seen[name] = type(error).__name__
    with open(file, "w") as written:
        json.dump(seen, written)
    return 1.0
"""
# Root sees everything, unless it has no capabilities, as in a container.
UNPRIVILEGED = ("setpriv", "--bounding-set=-all") if os.geteuid() == 0 else ()


async def test_reward_when_it_looks_at_the_service_then_it_sees_no_secret(
    buffer: BufferClient, buffer_address: str, tmp_path: Path
) -> None:
    if UNPRIVILEGED and not shutil.which("setpriv"):
        pytest.skip("as root it takes setpriv, which drops its capabilities")
    digest = await buffer.put_recipe("curious.py", CURIOUS.encode())
    service = service_process(
        "areal_reward",
        tmp_path,
        f"endpoints: {{buffer: '{buffer_address}'}}\n",
        before=UNPRIVILEGED,
        environment={"AREAL_TOKEN": TOKEN, **SECRETS},
    )
    async with service as running:
        security = Security(token=TOKEN)
        client = RewardClient(running.listen, security)
        try:
            item = ScoreItem("1+1=", "2", data={"file": str(tmp_path / "seen")})
            assert await client.score("reward_fn", digest, {}, [item]) == [1.0]
        finally:
            await client.close()
        seen = json.loads((tmp_path / "seen").read_text())
        assert TOKEN not in seen.pop("own environment")
        assert seen == dict.fromkeys(("environ", "mem"), "PermissionError")
        # The service itself still sees what it must: its metrics count its own files.
        async with (
            aiohttp.ClientSession(headers=security.headers()) as http,
            http.get(f"http://{running.metrics}/metrics") as reply,
        ):
            text = await reply.text()
        assert "process_open_fds" in text
        assert "process_resident_memory_bytes" in text
