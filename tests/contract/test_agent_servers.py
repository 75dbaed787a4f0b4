"""What every server of the agent APIs does with a reply, whatever its framework.

The gateway is asked as in production: through a worker's RPC, whose messages are passed on here
without a wire.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from tests.unit.areal.agents.raw_calls import session_of
from tests.unit.areal.agents.scripted_model import Scripted
from tests.waiting import until

from areal.agents.endpoint import Endpoint
from areal.agents.replies import Reply
from areal.agents.routes import handle
from areal.agents.session import Session
from areal.chassis.http_server import HttpServer, bind
from areal.chassis.waits import Waits
from areal.errors import CapacityExceeded, Unavailable
from areal.v1.buffer_service_pb2 import GetSessionResponse, SessionDelivered, UpdateSessionRequest
from areal.v1.rollout_service_pb2 import CallSessionRequest, CallSessionResponse
from areal_gateway.app import build_app
from areal_gateway.config import GatewayConfig
from areal_gateway.metrics import GatewayMetrics
from areal_gateway.status import RunStatus
from areal_inference.http_api import chat
from areal_rollout.servicer import RolloutService

KEY = "sk-1"
PATHS = {"chat/completions": False, "messages": True, "responses": True}
"""Of each API, whether the events of a stream have names."""


@dataclass
class Served:
    """A server of one session."""

    url: str
    key: str
    delivered: Callable[[], list[bool]]
    """Of each answer, whether it counts as delivered."""

    async def ask(self, api: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as http:
            return await http.post(
                f"{self.url}/{api}", headers=self.headers, content=body(api, **more)
            )

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}


def body(api: str, **more: Any) -> bytes:
    said = [{"role": "user", "content": "19 + 27?"}]
    asked = {"input": said} if api == "responses" else {"messages": said, "max_tokens": 99}
    return orjson.dumps({"model": "m", **asked, **more})


def delivered_by(session: Session) -> Callable[[], list[bool]]:
    return lambda: [call.delivered for call in session.calls._calls]  # type: ignore[attr-defined]


@asynccontextmanager
async def endpoint(session: Session, _: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    async with Endpoint() as opened:
        yield Served(opened.base_url, opened.open(session), delivered_by(session))


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    listener = bind("127.0.0.1", 0, "port")
    http = HttpServer(app, timeout_graceful_shutdown=1)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        http.should_exit = True
        await serving


@asynccontextmanager
async def engine(session: Session, patch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    patch.setattr(chat._Chat, "_session", lambda *_: session)
    routes = chat.chat_routes(None)  # type: ignore[arg-type]
    async with listening(Starlette(routes=routes)) as url:
        yield Served(f"{url}/v1", KEY, delivered_by(session))


class Worker:
    """A rollout worker and the ledger, as the gateway calls them."""

    def __init__(self, session: Session) -> None:
        self._session, self.updates = session, list[UpdateSessionRequest]()
        self._service = RolloutService(None, None, self)  # type: ignore[arg-type]

    async def serve(self, _: str, method: str, path: str, headers: Any, content: bytes) -> Reply:
        async def find(_: str) -> Session:
            return self._session

        receipt = UpdateSessionRequest(delivered=SessionDelivered(call_id="c", numbers=[0]))
        reply = await handle(find, method, path, headers, content)
        if reply.status != 200:
            return reply
        return replace(reply, receipt=receipt.SerializeToString())

    async def call_session(
        self, request: CallSessionRequest, *, wait_s: float
    ) -> AsyncGenerator[CallSessionResponse]:
        replies = self._service.CallSession(request, None)  # type: ignore[arg-type]
        try:
            async for each in replies:
                yield each
        finally:
            await replies.aclose()  # type: ignore[attr-defined]

    async def get(self, task_id: str, attempt: int, known: object = None) -> GetSessionResponse:
        return GetSessionResponse(key_digest=hashlib.sha256(KEY.encode()).hexdigest())

    async def update(self, request: UpdateSessionRequest) -> None:
        self.updates.append(request)

    def delivered(self) -> list[bool]:
        # As for `merge`: an answer that was not recorded is none, whatever the gateway says of it.
        calls = self._session.calls._calls  # type: ignore[attr-defined]
        return [bool(self.updates and call.response.output_tokens) for call in calls]


@asynccontextmanager
async def gateway(session: Session, _: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    worker: Any = Worker(session)
    run, metrics = RunStatus({}, history=9, max_rows=9), GatewayMetrics(CollectorRegistry())
    config = GatewayConfig(generation_s=50.0)  # type: ignore[call-arg]
    app = build_app(run, worker, None, metrics, Waits(), config, None, worker)
    async with listening(app) as url:
        yield Served(f"{url}/sessions/s-0/v1", KEY, worker.delivered)


servers = pytest.mark.parametrize("server", [endpoint, engine, gateway])


@servers
@pytest.mark.parametrize("api", PATHS)
async def test_answer_when_whole_then_it_is_json_of_a_known_length_and_delivered(
    server, api, monkeypatch
):
    async with server(session_of(Scripted("It is 46.")), monkeypatch) as served:
        reply = await served.ask(api)
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
        assert int(reply.headers["content-length"]) == len(reply.content)
        assert "46" in reply.text
        await until(lambda: served.delivered() == [True], "the record")


@servers
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("api", PATHS)
async def test_answer_when_streamed_then_its_headers_keep_proxies_from_holding_it_back(
    server, api, live, monkeypatch
):
    scripted = Scripted("It is é 46.")
    scripted.step = (lambda *_: asyncio.sleep(0)) if live else None
    async with server(session_of(scripted), monkeypatch) as served:
        reply = await served.ask(api, stream=True)
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"
        assert ("event: " in reply.text) == PATHS[api]
        assert "é" in reply.text
        await until(lambda: served.delivered() == [True], "the record")


@servers
async def test_head_when_answered_then_it_has_no_body_and_the_connection_stays_usable(
    server, monkeypatch
):
    one = httpx.Limits(max_connections=1)
    async with (
        server(session_of(Scripted()), monkeypatch) as served,
        httpx.AsyncClient(timeout=60, limits=one, headers=served.headers) as http,
    ):
        for _ in range(2):
            assert (await http.head(f"{served.url}/models")).content == b""
            assert (await http.get(f"{served.url}/models")).json()["data"]


@servers
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize(
    ("error", "status", "wait"),
    [
        (Unavailable("away"), 503, None),
        (CapacityExceeded("full; try again in 1.5 s"), 429, "2"),
        (CapacityExceeded("full"), 429, None),
    ],
)
async def test_answer_when_it_fails_before_its_text_then_status_and_wait_are_those_of_the_error(
    server, api, stream, error, status, wait, monkeypatch
):
    scripted = Scripted()
    scripted.errors.append(error)
    async with server(session_of(scripted), monkeypatch) as served:
        reply = await served.ask(api, stream=stream)
        assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json")
        assert reply.headers.get("retry-after") == wait
        assert (reply.json().get("type") == "error") == (api == "messages")
        assert str(error) in reply.json()["error"]["message"]
    assert True not in served.delivered()


@servers
@pytest.mark.parametrize("api", PATHS)
async def test_stream_when_it_fails_midway_then_its_last_event_says_so_and_it_is_not_delivered(
    server, api, monkeypatch
):
    scripted = Scripted("The answer is 46.")

    async def step(_: int, end: int) -> None:
        if end > 3:
            raise Unavailable("the model went away")

    scripted.step = step
    async with server(session_of(scripted), monkeypatch) as served:
        reply = await served.ask(api, stream=True)
    last = reply.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: " if PATHS[api] else "data: ")
    assert "the model went away" in orjson.loads(last.partition("data: ")[2])["error"]["message"]
    assert served.delivered() == [False]


@servers
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", PATHS)
async def test_client_when_it_hangs_up_before_the_answer_then_the_generation_stops(
    server, api, stream, monkeypatch
):
    scripted = Scripted("It is 46.")
    scripted.hold = asyncio.Event()
    async with server(session_of(scripted), monkeypatch) as served:
        asking = asyncio.create_task(served.ask(api, stream=stream))
        await until(lambda: scripted.requests, "the request")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: scripted.cancelled, "the end of the generation")
    assert served.delivered() == [False]


@servers
@pytest.mark.parametrize("api", PATHS)
async def test_client_when_it_hangs_up_midway_then_the_generation_stops_and_nothing_is_delivered(
    server, api, monkeypatch
):
    scripted = Scripted("The answer is 46.")
    stopped = asyncio.Event()

    async def step(_: int, end: int) -> None:
        try:
            await asyncio.sleep(0 if end < 4 else 600)
        except asyncio.CancelledError:
            stopped.set()
            raise

    scripted.step = step
    async with server(session_of(scripted), monkeypatch) as served:
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream(
                "POST",
                f"{served.url}/{api}",
                headers=served.headers,
                content=body(api, stream=True),
            ) as reply,
        ):
            async for _ in reply.aiter_bytes():
                break
        async with asyncio.timeout(60):
            await stopped.wait()
    assert served.delivered() == [False]
