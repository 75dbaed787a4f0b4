"""The stack's own traffic does not take the user's proxy, which is for the internet."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from areal.clients.base import open_channel
from areal.security import Security

DEAD = "http://127.0.0.1:9"
SERVICES = Path(__file__).parents[4] / "services"


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"])
async def test_channel_when_there_is_a_proxy_then_it_reaches_its_service(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for exempt in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(exempt, raising=False)
    monkeypatch.setenv(name, DEAD)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}", Security())
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await channel.close()
        await server.stop(0)


def test_channels_when_looked_for_then_all_are_made_in_one_place() -> None:
    making = re.compile(r"\b(insecure_channel|secure_channel)\(")
    found = {
        str(file.relative_to(SERVICES))
        for file in SERVICES.rglob("*.py")
        if making.search(file.read_text(encoding="utf-8"))
    }
    assert found == {"areal/clients/base.py"}


def test_http_sessions_when_looked_for_then_none_asks_for_the_proxies() -> None:
    """aiohttp, in which the stack speaks to itself, ignores proxies unless it is told otherwise."""
    told = re.compile(r"trust_env\s*=\s*True")
    assert not [f for f in SERVICES.rglob("*.py") if told.search(f.read_text(encoding="utf-8"))]
