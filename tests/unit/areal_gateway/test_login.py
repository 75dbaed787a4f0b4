"""The cookie that stands for the token."""

from __future__ import annotations

import re
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from areal.security import Security
from areal_gateway.login import LIFETIME_S, DashboardAuth, Sessions, log_in

TOKEN = "correct-horse-battery-staple"


def test_session_when_issued_then_valid_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("itsdangerous.timed.time", SimpleNamespace(time=lambda: now))
    sessions = Sessions(Security(token=TOKEN), "arithmetic/t0")
    cookie = sessions.issue()
    assert TOKEN not in cookie
    assert sessions.valid(cookie)
    now += LIFETIME_S - 1
    assert sessions.valid(cookie)
    now += 2
    assert not sessions.valid(cookie)


def test_session_when_forged_or_of_another_token_or_run_then_refused() -> None:
    sessions = Sessions(Security(token=TOKEN), "arithmetic/t0")
    cookie = sessions.issue()
    what, issued, mac = cookie.split(".")
    later = issued[:-1] + ("A" if issued[-1] != "A" else "B")
    other_token = Sessions(Security(token=TOKEN + "!"), "arithmetic/t0")
    other_run = Sessions(Security(token=TOKEN), "arithmetic/t1")
    assert other_run.cookie != sessions.cookie
    dashes = [Sessions(Security(token=TOKEN), name) for name in ("a-b/c", "a/b-c")]
    assert dashes[0].cookie != dashes[1].cookie
    assert not dashes[1].valid(dashes[0].issue())
    assert not other_token.valid(cookie)
    assert not other_run.valid(cookie)
    for forged in (
        "",
        ".",
        mac,
        f"{what}.{later}.{mac}",
        f"{what}.{issued}.{mac[:-1]}",
        f"write.{issued}.{mac}",
        f"{what}.\u00b2.{mac}",
        f"{what}.{'9' * 5000}.{mac}",
        f"{what}.{issued}.\udcff",
        f"{what}.{mac}",
    ):
        assert not sessions.valid(forged)


def login_app() -> httpx.AsyncClient:
    app, sessions = FastAPI(), Sessions(Security(token=TOKEN), "arithmetic/t0")
    app.add_middleware(DashboardAuth, sessions=sessions)

    @app.post("/login")
    async def login(request: Request) -> Response:
        return await log_in(request, sessions)

    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def test_cookie_when_it_comes_with_a_call_that_changes_something_then_refused() -> None:
    async with login_app() as http:
        assert (await http.post("/login", data={"token": TOKEN})).status_code == 303
        assert (await http.get("/tasks")).status_code == 404  # admitted; this app has no such page
        for method in ("POST", "PUT", "DELETE"):
            assert (await http.request(method, "/tasks")).status_code == 401


@pytest.mark.parametrize("at", ["/", "/login"])
async def test_login_page_when_shown_then_nothing_foreign_is_loaded_framed_or_told(at: str) -> None:
    async with login_app() as http:
        page = await (http.get("/") if at == "/" else http.post("/login", data={"token": "no"}))
    assert page.status_code == 401
    policy = dict(
        each.strip().split(" ", 1) for each in page.headers["content-security-policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "style-src": "'self'",
        "form-action": "'self'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert re.findall(r'(?:src|href|action)="([^"]+)"', page.text) == ["static/style.css", "login"]
    assert "<script" not in page.text


async def test_login_when_the_token_is_right_then_its_answer_is_kept_nowhere() -> None:
    async with login_app() as http:
        reply = await http.post("/login", data={"token": TOKEN})
    assert (reply.status_code, reply.headers["cache-control"]) == (303, "no-store")
