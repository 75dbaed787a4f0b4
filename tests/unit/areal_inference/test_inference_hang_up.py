"""A client that leaves during its call: the call ends, and its place is free again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from areal_inference.http_api import generation


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_call_when_its_client_hangs_up_then_it_is_aborted_and_forgotten(
    stream: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SimpleNamespace(rid="a", finish=None, woken=asyncio.Event())
    call = SimpleNamespace(stream=stream, requests=[request], as_list=False)
    done: list[str] = []
    frontend: Any = SimpleNamespace(
        encode=lambda: None,
        decode=lambda: None,
        limits=None,
        see=None,
        constrain=None,
        adapters={},
        start=lambda _: done.append("started"),
        finished=lambda _: done.append("finished"),
        engine=SimpleNamespace(tell=lambda _: done.append("aborted")),
    )
    monkeypatch.setattr(generation, "parse_generate", lambda *_: call)
    body = {"type": "http.request", "body": b"{}", "more_body": False}
    came = iter([body])
    started = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if (message := next(came, None)) is not None:
            return message
        if not early:
            await asyncio.wait({asyncio.ensure_future(started.wait())}, timeout=0.05)
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        started.set()

    app = Starlette(routes=[Route("/", generation.generate_route(frontend), methods=["POST"])])
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    assert done == ["started", "aborted", "finished"]
