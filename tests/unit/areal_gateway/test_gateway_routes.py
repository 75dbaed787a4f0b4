"""The gateway's routes, answered in this process: what is counted, refused, and let in."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from areal.chassis.waits import Waits
from areal.errors import (
    ArealError,
    CapacityExceeded,
    NotFound,
    StaleIncarnation,
    Unauthenticated,
    Unavailable,
    WaitTimeout,
    WorkflowError,
)
from areal.security import Security
from areal_gateway.app import build_app
from areal_gateway.config import GatewayConfig
from areal_gateway.login import DashboardAuth, Sessions
from areal_gateway.metrics import GatewayMetrics
from areal_gateway.status import RunStatus


class Refusing:
    """A rollout service that answers every call with one error."""

    def __init__(self, error: ArealError) -> None:
        self.error = error

    async def get_tasks(self, *_: Any, **__: Any) -> list[Any]:
        raise self.error


class Gateway:
    """The application, and what it counts."""

    def __init__(self, error: ArealError | None = None, **config: Any) -> None:
        self.run = RunStatus({}, history=10, max_rows=10, configured=["ledger"])
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.app = build_app(
            self.run,
            Refusing(error) if error else None,  # type: ignore[arg-type]
            None,
            self.metrics,
            Waits(),
            GatewayConfig(**config),
        )

    async def get(self, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.get(path)

    def counted(self) -> dict[tuple[str, str], float]:
        [metric] = self.metrics.requests.collect()
        return {
            (each.labels["route"], each.labels["code"]): each.value
            for each in metric.samples
            if each.name.endswith("_total")
        }

    @asynccontextmanager
    async def stream(self) -> Any:
        """An event stream that has begun, by its status code; a page that leaves at the end."""
        begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        leaves = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.code = message["status"]
            elif not begun.done():
                begun.set_result(self.code)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/v1/events",
            "raw_path": b"/v1/events",
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "client": ("c", 1),
            "server": ("s", 1),
        }
        page = asyncio.create_task(self.app(scope, receive, send))  # type: ignore[arg-type]
        try:
            yield await asyncio.wait_for(begun, 60)
        finally:
            leaves.set()
            self.run.tick()
            await asyncio.wait_for(page, 60)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFound("it is gone"), 404),
        (CapacityExceeded("it is full"), 429),
        (Unavailable("it is away"), 503),
        (WaitTimeout("an answer"), 504),
        (ArealError("it is odd"), 502),
        (WorkflowError("it is broken"), 502),
        (StaleIncarnation("it is old"), 502),
        (Unauthenticated("it refuses the gateway's token"), 502),
    ],
)
async def test_call_when_the_service_behind_refuses_then_the_code_says_whether_to_try_again(
    error: ArealError, code: int
) -> None:
    gateway = Gateway(error)
    answer = await gateway.get("/v1/tasks/one")
    assert (answer.status_code, answer.json()) == (code, {"error": str(error)})


async def test_requests_when_counted_then_by_route_and_not_by_what_is_asked_for() -> None:
    gateway = Gateway(NotFound("it is gone"))
    for name in ("one", "two", "three"):
        await gateway.get(f"/v1/tasks/{name}")
    await gateway.get("/nowhere")
    await gateway.get("/healthz")
    assert gateway.counted() == {
        ("/v1/tasks/{task_id}", "404"): 3,
        ("other", "404"): 1,
        ("/healthz", "200"): 1,
    }


async def test_streams_when_as_many_are_open_as_allowed_then_the_next_is_refused() -> None:
    gateway = Gateway(max_streams=2)
    for _ in range(2):  # pages that left have left room
        async with AsyncExitStack() as pages:
            assert [await pages.enter_async_context(gateway.stream()) for _ in "ab"] == [200] * 2
            refused = await gateway.get("/v1/events")
            assert (refused.status_code, "2 event streams are open" in refused.text) == (503, True)
            assert gateway.metrics.streams._value.get() == 2
    assert gateway.metrics.streams._value.get() == 0


async def test_waits_when_sources_do_not_answer_then_those_that_have_an_address_are_named() -> None:
    run = RunStatus({}, history=1, max_rows=1, configured=["ledger", "trainer"])
    run.put("ledger", {})
    run.fail("trainer", "it is away")
    run.fail("servers", "has no address")
    assert [(wait.on, wait.detail) for wait in run.waits()] == [("trainer", "it is away")]


def test_cookie_when_it_is_good_then_it_reads_and_never_changes_anything() -> None:
    async def nothing(*_: Any) -> None: ...

    sessions = Sessions(Security(token="correct-horse-battery-staple"), "e/t")
    auth = DashboardAuth(nothing, sessions=sessions)
    cookie = f"{sessions.cookie}={sessions.issue()}"

    def admitted(method: str, path: str, cookie: str = cookie) -> bool:
        headers = [(b"cookie", cookie.encode())]
        return auth.admits({"type": "http", "method": method, "path": path, "headers": headers})

    assert admitted("GET", "/v1/status")
    assert admitted("HEAD", "/v1/status")
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert not admitted(method, "/v1/tasks")
    assert not admitted("GET", "/v1/status", cookie + "0")
    assert admitted("GET", "/static/style.css", "")
    assert not admitted("POST", "/static/style.css", "")
    for other in ("dashboard.js", "index.html", "../app.py", "style.css/", "", "style.css%2f.."):
        assert not admitted("GET", f"/static/{other}", "")
