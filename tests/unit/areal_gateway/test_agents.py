"""Sessions of outside agents at the gateway: who opens them, who uses them, what is passed on."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from areal.chassis.waits import Waits
from areal.errors import CapacityExceeded, LeaseLost, NotFound, Unavailable
from areal.security import Security
from areal.types import Purpose, Task
from areal.v1.buffer_service_pb2 import (
    GetSessionResponse,
    OpenSessionResponse,
    SessionDelivered,
    UpdateSessionRequest,
)
from areal.v1.rollout_service_pb2 import CallSessionRequest, CallSessionResponse
from areal_gateway import agents, rest
from areal_gateway.app import Json, build_app
from areal_gateway.config import GatewayConfig
from areal_gateway.login import Sessions
from areal_gateway.metrics import GatewayMetrics
from areal_gateway.status import RunStatus


class Ledger:
    """Keeps what was opened, and the first salt of each; full when told so."""

    def __init__(self) -> None:
        self.opened: list[tuple[Task, list[str], float]] = []
        self.salts: dict[str, bytes] = {}
        self.full = ""
        self.keys: dict[tuple[str, int], str] = {("s", 0): "sk-1"}
        self.asked = 0
        self.updates: list[UpdateSessionRequest] = []

    async def get(self, task_id: str, attempt: int, known: object = None) -> GetSessionResponse:
        self.asked += 1
        key = self.keys.get((task_id, attempt))
        if key is None:
            raise NotFound(f"session {task_id}-{attempt}: unknown")
        return GetSessionResponse(key_digest=hashlib.sha256(key.encode()).hexdigest())

    async def update(self, request: UpdateSessionRequest) -> None:
        self.updates.append(request)

    async def open(
        self, task: Task, key_digests: list[str], idle_s: float, salt: bytes
    ) -> OpenSessionResponse:
        if self.full:
            raise CapacityExceeded(self.full)
        self.opened.append((task, key_digests, idle_s))
        return OpenSessionResponse(policy_version=3, salt=self.salts.setdefault(task.task_id, salt))


class Worker:
    """Answers every call, and keeps them."""

    receipt = b""
    breaks = False
    stream = True

    def __init__(self) -> None:
        self.calls: list[tuple[CallSessionRequest, float]] = []

    async def call_session(
        self, request: CallSessionRequest, *, wait_s: float
    ) -> AsyncGenerator[CallSessionResponse]:
        self.calls.append((request, wait_s))
        yield CallSessionResponse(
            status=418,
            body=b"data: 1\n\n",
            stream=self.stream,
            headers={"Retry-After": "7"},
            receipt=self.receipt,
        )
        if self.breaks:
            raise Unavailable("the worker died")
        yield CallSessionResponse(body=b"data: 2\n\n")


def app_of(ledger: Ledger, worker: Worker, **limits: int) -> FastAPI:
    return build_app(
        RunStatus({}, history=10, max_rows=10),
        worker,  # type: ignore[arg-type]
        None,
        GatewayMetrics(CollectorRegistry()),
        Waits(),
        GatewayConfig(generation_s=50.0, **limits),  # type: ignore[arg-type]
        Sessions(Security(token="secret"), "a/b"),
        ledger,  # type: ignore[arg-type]
    )


def at_gateway(ledger: Ledger, worker: Worker, **limits: int) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_of(ledger, worker, **limits))
    return httpx.AsyncClient(transport=transport, base_url="http://gate:8080")


@pytest.fixture
async def gateway() -> Any:
    ledger, worker = Ledger(), Worker()
    async with at_gateway(ledger, worker) as http:
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


async def test_open_when_asked_again_with_its_idempotency_key_then_any_gateway_answers_alike(
    gateway,
):
    http, ledger, worker = gateway
    headers, body = {**OURS, "Idempotency-Key": "try-7"}, {"n": 2}
    first = (await http.post("/v1/sessions", json=body, headers=headers)).json()
    async with at_gateway(ledger, worker) as other:
        again = (await other.post("/v1/sessions", json=body, headers=headers)).json()
    assert again == first
    assert ledger.opened[0][1] != ledger.opened[1][1]  # it proposed keys of its own
    headers["Idempotency-Key"] = "try-8"
    another = (await http.post("/v1/sessions", json=body, headers=headers)).json()
    ids = {each[field] for each in (first, another) for field in ("id", "api_key")}
    assert len(ids) == 4
    assert "try" not in first["id"]


async def test_open_when_the_idempotency_key_is_too_long_then_refused_in_one_line(gateway):
    http, ledger, _ = gateway
    reply = await http.post("/v1/sessions", headers={**OURS, "Idempotency-Key": "x" * 256})
    assert reply.status_code == 400
    assert "Idempotency-Key: got 256 characters, expected 1 to 255" in reply.text
    assert not ledger.opened


async def test_open_when_there_is_no_room_then_429_says_when(gateway):
    http, ledger, _ = gateway
    ledger.full = "admission: 4 running; try again in 1.5 s"
    reply = await http.post("/v1/sessions", headers=OURS)
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "2")


async def test_answer_when_all_of_it_was_sent_then_its_receipt_is_stored_and_else_not(gateway):
    http, ledger, worker = gateway
    delivered = SessionDelivered(call_id="c", numbers=[3, 4])
    worker.receipt = UpdateSessionRequest(delivered=delivered).SerializeToString()
    await http.post("/sessions/s-0/v1/messages", content=b"{}")
    assert [update.delivered for update in ledger.updates] == [delivered]
    worker.breaks = True
    reply = await http.post("/sessions/s-0/v1/messages", content=b"{}")
    assert reply.content.startswith(b"data: 1\n\nevent: error\n")
    assert len(ledger.updates) == 1


async def test_call_when_its_client_names_it_then_the_name_is_passed_on(gateway):
    http, _, worker = gateway
    for name in ("Idempotency-Key", "X-Client-Request-Id", "api-key"):
        await http.post("/sessions/s-0/v1/messages", content=b"{}", headers={name: "x"})
        assert dict(worker.calls[-1][0].headers) == {name.lower(): "x"}


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


@pytest.mark.parametrize(
    ("session", "headers"),
    [
        ("s-0", {}),
        ("s-0", {"x-api-key": "sk-2"}),
        ("s-0", {"Authorization": "Bearer sk-2"}),
        ("s-1", {"x-api-key": "sk-1"}),
        ("other-0", {"x-api-key": "sk-1"}),
        ("s", {"x-api-key": "sk-1"}),
        ("s-00", {"x-api-key": "sk-1"}),
        ("s-\u0660", {"x-api-key": "sk-1"}),
    ],
)
async def test_call_when_its_key_is_wrong_then_no_byte_of_its_body_is_passed_on(
    gateway, session, headers
):
    http, _, worker = gateway
    reply = await http.post(
        f"/sessions/{session}/v1/messages", content=b"x" * 100_000, headers=headers
    )
    [(passed, _)] = worker.calls  # it refuses in the words of its API
    assert (passed.content, reply.headers["connection"]) == (b"", "close")


async def test_call_when_the_key_was_right_before_then_the_ledger_is_not_asked_again(gateway):
    http, ledger, worker = gateway
    for _ in range(3):
        await http.post("/sessions/s-0/v1/messages", content=b"{}", headers={"x-api-key": "sk-1"})
        await http.post("/sessions/s-0/v1/messages", content=b"{}", headers={"x-api-key": "sk-2"})
    assert ledger.asked == 1
    assert [passed.content for passed, _ in worker.calls] == [b"{}", b""] * 3


async def test_call_when_the_session_was_opened_again_then_its_new_key_is_right(
    gateway, monkeypatch
):
    http, ledger, worker = gateway
    monkeypatch.setattr("areal_gateway.session_bodies._FRESH_S", 0.0)
    await http.post("/sessions/s-0/v1/messages", content=b"{}", headers={"x-api-key": "sk-1"})
    ledger.keys["s", 0] = "sk-3"
    await http.post("/sessions/s-0/v1/messages", content=b"{3}", headers={"x-api-key": "sk-3"})
    await http.post("/sessions/s-0/v1/messages", content=b"{1}", headers={"x-api-key": "sk-1"})
    assert [passed.content for passed, _ in worker.calls] == [b"{}", b"{3}", b""]


async def test_call_when_bodies_of_others_fill_the_room_then_it_waits_and_then_is_refused(
    monkeypatch,
):
    ledger, worker = Ledger(), Worker()
    ours = {"x-api-key": "sk-1", "Content-Length": "3000"}
    async with at_gateway(ledger, worker, max_bodies_bytes=5000) as http:

        async def send() -> httpx.Response:
            url = "/sessions/s-0/v1/messages"
            return await http.post(url, content=b"x" * 3000, headers=ours, timeout=None)

        held = asyncio.Event()
        answer = worker.call_session

        async def slow(request: CallSessionRequest, *, wait_s: float) -> Any:
            held.set()
            await going.wait()
            async for each in answer(request, wait_s=wait_s):
                yield each

        going = asyncio.Event()
        monkeypatch.setattr(worker, "call_session", slow)
        first = asyncio.create_task(send())
        await held.wait()
        second = asyncio.create_task(send())
        monkeypatch.setattr("areal_gateway.session_bodies.ROOM_WITHIN_S", 0.05)
        refused = await send()
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
        assert "3000 bytes are being answered, at most 5000" in refused.text
        going.set()
        assert (await first).status_code == 418
        assert (await second).status_code in (418, 429)  # its wait may have begun late
        assert (await send()).status_code == 418


async def test_call_when_its_body_does_not_come_then_hung_up(monkeypatch):
    monkeypatch.setattr("areal_gateway.session_bodies.BODY_WITHIN_S", 0.05)
    ledger, worker = Ledger(), Worker()
    app = app_of(ledger, worker)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not sent:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"x-api-key", b"sk-1"), (b"content-length", b"99"), (b"host", b"gate")]
    await app(scope_of("POST", "/sessions/s-0/v1/messages", headers), receive, send)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert worker.calls == []


def scope_of(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


@pytest.mark.parametrize(
    "task",
    [
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"a": ' + b'{"b":' * 900 + b"1" + b"}" * 900 + b"}",
    ],
)
async def test_open_when_the_task_cannot_be_kept_then_400_and_never_500(gateway, task):
    http, ledger, _ = gateway
    headers = {**OURS, "Content-Type": "application/json"}
    reply = await http.post("/v1/sessions", content=b'{"task": ' + task + b"}", headers=headers)
    assert (reply.status_code, ledger.opened) == (400, [])
    assert len(reply.json()["error"]) < 300


def test_models_when_a_field_is_any_object_then_it_is_checked_that_it_can_be_kept():
    """A field that takes any JSON says so by `JsonObject`, which refuses what cannot be sent."""
    models = [*rest._Model.__subclasses__(), agents.OpenIn]
    for model in models:
        for name, field in model.model_fields.items():
            if "Any" in str(field.annotation):
                assert rest._travels in [getattr(m, "func", None) for m in field.metadata], name


class Failing(Worker):
    """Fails before its answer, or in the middle of it."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__()
        self.error, self.after = error, after

    async def call_session(
        self, request: CallSessionRequest, *, wait_s: float
    ) -> AsyncGenerator[CallSessionResponse]:
        for _ in range(self.after):
            yield CallSessionResponse(status=200, body=b"data: 1\n\n", stream=True)
        raise self.error


@pytest.mark.parametrize("api", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Unavailable("the worker is away"), 503, "overloaded_error"),
        (CapacityExceeded("full; try again in 1.5 s"), 429, "rate_limit_error"),
        (LeaseLost("it has ended"), 410, "session_ended"),
        (ZeroDivisionError("secret"), 500, ""),
    ],
)
async def test_call_when_it_fails_at_the_gateway_then_the_format_is_that_of_the_api(
    api, error, status, kind
):
    transport = httpx.ASGITransport(app_of(Ledger(), Failing(error, 0)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gate") as http:
        reply = await http.post(f"/sessions/s-0/v1/{api}", content=b"{}")
    assert reply.status_code == status
    body = reply.json()
    expected = kind or ("api_error" if api == "messages" else "server_error")
    assert body["error"]["type"] == expected
    assert "secret" not in reply.text
    assert (body.get("type") == "error") == (api == "messages")
    assert reply.headers.get("Retry-After") == ("2" if status == 429 else None)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages", "messages/x", ""])
async def test_call_when_its_body_is_too_long_then_413_in_the_format_of_the_api(api, declared):
    async def pieces() -> AsyncGenerator[bytes]:
        for _ in range(4):
            yield b"x" * 1000

    path = f"/sessions/s-0/v1/{api}" if api else "/v1/tasks"
    async with at_gateway(Ledger(), worker := Worker(), max_body_bytes=3000) as http:
        content = b"x" * 4000 if declared else pieces()
        json_ = {**({"x-api-key": "sk-1"} if api else OURS), "Content-Type": "application/json"}
        reply = await http.post(path, content=content, headers=json_)
        assert (await http.post(path, content=b"x" * 3000, headers=json_)).status_code != 413
    assert reply.status_code == 413
    error = reply.json()["error"]
    if api:
        assert error["type"] == "request_too_large"
        assert (reply.json().get("type") == "error") == api.startswith("messages")
        error = error["message"]
    assert "body: expected at most 3000 bytes" in error
    assert len(worker.calls) == bool(api)


@pytest.mark.parametrize(("api", "named"), [("chat/completions", False), ("messages", True)])
@pytest.mark.parametrize("error", [Unavailable("away"), ZeroDivisionError("secret")])
async def test_stream_when_it_breaks_then_its_last_event_is_the_error(api, named, error):
    async with at_gateway(Ledger(), Failing(error, 1)) as http:
        reply = await http.post(f"/sessions/s-0/v1/{api}", content=b"{}")
    first, last = reply.text.strip().split("\n\n")
    assert first == "data: 1"
    assert last.startswith("event: error\ndata: " if named else "data: ")
    assert "error" in json.loads(last.partition("data: ")[2])
    assert "secret" not in last


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"task": {"a": 123456789012345678901234567890}}', 200),
        (b'{"task": {"a": [NaN]}}', 400),
        (b'{"task": {"a": -1e999}}', 400),
        (b'{"task": {"a": "\\ud800"}}', 400),
        (b'{"task": {"\\ud800": 1}}', 400),
        (b'{"\\ud800": 1}', 400),
        (b'{"task": {"a": ' + b"[" * 300 + b"]" * 300 + b"}}", 400),
        (b'{"task": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", 400),
    ],
)
async def test_open_when_the_task_has_unusual_json_then_kept_or_refused(gateway, content, status):
    http, ledger, _ = gateway
    headers = {**OURS, "Content-Type": "application/json"}
    reply = await http.post("/v1/sessions", content=content, headers=headers)
    assert reply.status_code == status, reply.text
    assert len(ledger.opened) == (status == 200)


def test_answer_when_it_has_a_long_integer_then_it_is_written_digit_for_digit():
    assert Json({"a": 3**90}).body == b'{"a":%d}' % 3**90


async def test_answer_when_its_client_hangs_up_before_its_last_byte_then_it_is_not_delivered():
    ledger, worker = Ledger(), Worker()
    worker.receipt = UpdateSessionRequest(delivered=SessionDelivered()).SerializeToString()
    worker.stream = False
    full, gone, room = asyncio.Event(), asyncio.Event(), asyncio.Event()
    came = iter([{"type": "http.request"}])

    async def receive() -> dict[str, Any]:
        if (message := next(came, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            full.set()
            await room.wait()

    headers = [(b"x-api-key", b"sk-1"), (b"content-length", b"0"), (b"host", b"gate")]
    scope = scope_of("POST", "/sessions/s-0/v1/messages", headers)
    serving = asyncio.create_task(app_of(ledger, worker)(scope, receive, send))
    await full.wait()
    gone.set()  # in this order, as uvicorn does
    room.set()
    await serving
    assert ledger.updates == []
