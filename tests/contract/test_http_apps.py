"""What every aiohttp server of ours does with a request that it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from tests.ports import free_port

from areal.chassis.authentication import Doorkeeper
from areal.chassis.http_app import HttpApp
from areal.chassis.service import ServiceContext, _Pages
from areal.errors import ArealError, CapacityExceeded, Unavailable
from areal.security import Security
from areal.weights.sidecar import Sidecar
from areal_sandbox.e2b.app import E2BApp
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.weights import WeightStore

TOKEN = "correct-horse-battery-staple"
OURS = {"Authorization": f"Bearer {TOKEN}"}
# By server: a route, and the method that handles it.
ROUTES = {
    "pages": ("GET", "/waits", "_waits"),
    "store": ("POST", "/versions/v00000001-inc1", "_begin"),
    "sidecar": ("POST", "/stage_weights", "_stage"),
    "sandbox": ("POST", "/sandboxes", "_create"),
}


def app_of(name: str, folder: Path, security: Security) -> HttpApp:
    if name == "store":
        return StoreApp(WeightStore(folder, folder), list, lambda: None, security)
    if name == "sidecar":
        return Sidecar(folder, security)
    if name == "sandbox":
        return E2BApp(None, security)  # type: ignore[arg-type]
    context = ServiceContext("a", "127.0.0.1:0", None, security)
    return _Pages(context, asyncio.Event(), Doorkeeper("a", security, CollectorRegistry()))


@pytest.fixture(params=ROUTES)
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    name = request.param
    app = app_of(name, tmp_path, Security(token=TOKEN))

    def fails_with(error: Exception) -> None:
        async def handler(_: web.Request) -> web.Response:
            raise error

        setattr(app, ROUTES[name][2], handler)

    port = free_port()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=OURS) as http:

        async def ask(**more: Any) -> tuple[int, Any, Any]:
            if app._runner is None:
                await app.start("127.0.0.1", port)
            method, path, _ = ROUTES[name]
            asked = {"method": method, "url": path, **more}
            async with http.request(**asked) as reply:
                return reply.status, reply.headers, await reply.json()

        yield app, ask, fails_with
    await app.close()


Server = tuple[HttpApp, Callable[..., Any], Callable[[Exception], None]]


def said(answer: dict[str, Any]) -> str:
    """The one line of each format."""
    return answer.get("error") or answer["message"]


async def test_request_when_its_token_is_wrong_then_401_says_which_one_is_expected(server: Server):
    status, headers, answer = await server[1](headers={"Authorization": "Bearer wrong"})
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert "requires a bearer token" in said(answer)


async def test_request_when_there_is_no_such_route_then_404_or_405_in_the_servers_format(
    server: Server,
):
    status, _, answer = await server[1](url="/sandboxes/a/b/c")
    assert (status, said(answer).endswith("/sandboxes/a/b/c: Not Found")) == (404, True)
    status, headers, answer = await server[1](method="PATCH")
    assert (status, said(answer).startswith("PATCH /")) == (405, True)
    assert headers["Allow"]


async def test_request_when_its_body_is_too_long_then_413_says_the_limit(server: Server):
    app, ask, _ = server
    app._max_body_bytes = 1000
    if isinstance(app, _Pages):
        pytest.skip("reads no body")
    status, _, answer = await ask(data=b"x" * 5000)
    assert (status, said(answer)) == (413, "body: expected at most 1000 bytes")


async def test_handler_when_it_has_a_bug_then_500_and_only_the_log_has_the_details(server: Server):
    _, ask, fails_with = server
    fails_with(ZeroDivisionError("secret"))
    with capture_logs() as logs:
        status, _, answer = await ask()
    assert (status, said(answer)) == (500, "ZeroDivisionError: see the log of the service")
    assert [str(each["exc_info"]) for each in logs if each["event"] == "request_failed"] == [
        "secret"
    ]


@pytest.mark.parametrize(
    ("error", "status", "wait"),
    [
        (Unavailable("away"), 503, None),
        (CapacityExceeded("full; try again in 1.5 s"), 429, "2"),
        (CapacityExceeded("full"), 429, None),
    ],
)
async def test_handler_when_it_refuses_then_status_and_wait_are_those_of_the_error(
    server: Server, error: ArealError, status: int, wait: str | None
):
    app, ask, fails_with = server
    fails_with(error)
    got, headers, answer = await ask()
    if isinstance(app, StoreApp) and status == 429:
        status = 507  # a disk is full, not a queue
    assert (got, headers.get("Retry-After"), said(answer)) == (status, wait, str(error))


async def test_request_when_there_is_no_token_then_one_of_a_foreign_page_is_refused(
    tmp_path: Path,
):
    for name, (method, path, _) in ROUTES.items():
        app, port = app_of(name, tmp_path, Security()), free_port()
        await app.start("127.0.0.1", port)
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
            http.request(method, path, headers={"Origin": "http://evil.example"}) as reply,
        ):
            assert reply.status == 403
            assert "without a token" in said(await reply.json())
        await app.close()
