"""Sessions of outside agents at the gateway: who opens them, who uses them, what is passed on."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from areal.chassis.waits import Waits
from areal.errors import CapacityExceeded
from areal.security import Security
from areal.types import Purpose, Task
from areal.v1.rollout_service_pb2 import CallSessionRequest, CallSessionResponse
from areal_gateway.app import build_app
from areal_gateway.config import GatewayConfig
from areal_gateway.login import Sessions
from areal_gateway.metrics import GatewayMetrics
from areal_gateway.status import RunStatus


class Ledger:
    """Keeps what was opened; full when told so."""

    def __init__(self) -> None:
        self.opened: list[tuple[Task, list[str], float]] = []
        self.full = ""

    async def open(self, task: Task, key_digests: list[str], idle_s: float) -> int:
        if self.full:
            raise CapacityExceeded(self.full)
        self.opened.append((task, key_digests, idle_s))
        return 3


class Worker:
    """Answers every call, and keeps them."""

    def __init__(self) -> None:
        self.calls: list[tuple[CallSessionRequest, float]] = []

    async def call_session(
        self, request: CallSessionRequest, *, wait_s: float
    ) -> AsyncGenerator[CallSessionResponse]:
        self.calls.append((request, wait_s))
        yield CallSessionResponse(
            status=418, body=b"data: 1\n\n", stream=True, headers={"Retry-After": "7"}
        )
        yield CallSessionResponse(body=b"data: 2\n\n")


@pytest.fixture
async def gateway() -> Any:
    ledger, worker = Ledger(), Worker()
    app = build_app(
        RunStatus({}, history=10, max_rows=10),
        worker,  # type: ignore[arg-type]
        None,
        GatewayMetrics(CollectorRegistry()),
        Waits(),
        GatewayConfig(generation_s=50.0),
        Sessions(Security(token="secret"), "a/b"),
        ledger,  # type: ignore[arg-type]
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gate:8080") as http:
        yield http, ledger, worker


OURS = {"Authorization": "Bearer secret"}


async def test_open_when_asked_with_the_token_then_keys_are_told_once_and_kept_hashed(gateway):
    http, ledger, _ = gateway
    assert (await http.post("/v1/sessions", json={})).status_code == 401
    body = {"task": {"q": 1}, "n": 2, "ttl_s": 9, "purpose": "serve"}
    told = (await http.post("/v1/sessions", json=body, headers=OURS)).json()
    [(task, digests, idle_s)] = ledger.opened
    assert (task.purpose, task.data, idle_s) == (Purpose.SERVE, {"q": 1}, 9)
    keys = [each["api_key"] for each in told["sessions"]]
    assert digests == [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    assert [each["id"] for each in told["sessions"]] == [f"{task.task_id}-{n}" for n in range(2)]
    assert told["base_url"] == f"http://gate:8080/sessions/{task.task_id}-0/v1"
    assert (told["policy_version"], told["api_key"]) == (3, keys[0])
    await http.post("/v1/sessions", headers=OURS)
    assert ledger.opened[1][2] == 100.0


async def test_open_when_there_is_no_room_then_429_says_when(gateway):
    http, ledger, _ = gateway
    ledger.full = "admission: 4 running; try again in 1.5 s"
    reply = await http.post("/v1/sessions", headers=OURS)
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "2")


async def test_call_when_it_has_no_token_of_the_gateway_then_passed_on_with_its_own_key(gateway):
    http, _, worker = gateway
    headers = {"x-api-key": "sk-1", "x-stainless-retry-count": "2", "Cookie": "private"}
    reply = await http.post("/sessions/s-0/v1/messages?beta=true", content=b"{}", headers=headers)
    assert (reply.status_code, reply.headers["Retry-After"]) == (418, "7")
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.content == b"data: 1\n\ndata: 2\n\n"
    [(passed, wait_s)] = worker.calls
    assert (passed.session_id, passed.method, passed.path) == ("s-0", "POST", "/v1/messages")
    assert dict(passed.headers) == {"x-api-key": "sk-1", "x-stainless-retry-count": "2"}
    assert (passed.content, wait_s) == (b"{}", 100.0)
    await http.get("/sessions/s-0")
    assert (worker.calls[1][0].method, worker.calls[1][0].path) == ("GET", "")
