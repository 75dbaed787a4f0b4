"""How long a server waits for a version, and what it tries when it cannot pull one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from tests.ports import free_port

from areal.weights.manifest import PolicyVersion
from areal_weight_sync.engine import http
from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.engine.givers import Givers
from areal_weight_sync.engine.http import HttpEngine, open_session
from areal_weight_sync.engine.routes import Routes


async def test_stage_when_another_server_never_ends_then_the_store_within_the_deadline() -> None:
    asked: list[str] = []

    async def stage(request: web.Request) -> web.Response:
        asked.append((await request.json())["model_path"])
        return web.json_response({"success": True, "checksums": {"a": "b"}})

    app = web.Application()
    app.add_routes([web.post("/stage_weights", stage)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port, givers = free_port(), Givers()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    version = PolicyVersion(1, 1, "", tensors=())
    store = f"http://store:1/versions/{version.folder_name}"
    routes = Routes(("stream",), "http://store:1", 8501)
    try:
        async with open_session({}) as session, givers.turn(version.folder_name, timeout=1.0):
            engine = HttpEngine(f"http://127.0.0.1:{port}", session, routes=routes, givers=givers)
            async with asyncio.timeout(20.0):
                await engine.stage(version, timeout=4.0)
    finally:
        await runner.cleanup()
    assert asked == [store]


async def _serve(answer: Callable[[web.Request], Awaitable[web.Response]]) -> web.AppRunner:
    app = web.Application()
    app.router.add_post("/stage_weights", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


@pytest.mark.parametrize("transport", ["disk", "stream"])
async def test_stage_when_the_engine_never_answers_then_ended_by_the_bytes_deadline(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(http, "patience_s", lambda size_bytes: 0.1 + size_bytes)
    over = asyncio.Event()

    async def never(_: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    runner = await _serve(never)
    version = PolicyVersion(1, 1, "/volume/v00000001-inc1", tensors=())
    routes = Routes((transport,), "http://store:1", 8501)
    source = version.path if transport == "disk" else "http://store:1/versions/"
    try:
        async with open_session({}) as session:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            engine = HttpEngine(url, session, routes=routes)
            with pytest.raises(EngineError, match=rf"{source}.* was not read within 0\.[12] s"):
                async with asyncio.timeout(30.0):
                    await engine.stage(version, timeout=600.0)
    finally:
        over.set()
        await runner.cleanup()


async def test_stage_when_a_server_can_pull_nothing_then_the_folder_and_the_giver_is_kept() -> None:
    async def no_such_endpoint(_: web.Request) -> web.Response:
        return web.Response(status=404)

    runner, givers = await _serve(no_such_endpoint), Givers()
    version = PolicyVersion(1, 1, "/volume/v00000001-inc1", tensors=())
    name, others = version.folder_name, ["http://a:1", "http://b:1"]
    for other in others:
        async with givers.turn(name, timeout=1.0) as turn:
            turn.taker = other
            if turn.giver:
                assert turn.giver == others[0]
    routes = Routes(("stream", "disk"), "http://store:1", free_port())
    try:
        async with open_session({}) as session:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            engine = HttpEngine(url, session, routes=routes, givers=givers)
            assert await engine.stage(version, timeout=20.0) is None
            assert engine._staged == (version, version.path)
    finally:
        await runner.cleanup()
    assert [other for other in others if givers.holds(name, other)] == others


async def test_load_when_one_way_refuses_late_then_the_others_have_only_the_time_left() -> None:
    over = asyncio.Event()

    async def stage(request: web.Request) -> web.Response:
        if (await request.json())["model_path"] == "/volume/v00000001-inc1":
            return web.Response(status=404)  # as SGLang: it reads the folder itself
        await asyncio.sleep(3.0)
        return web.json_response({"success": False, "message": "disk full"}, status=400)

    async def never(_: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/stage_weights", stage)])
    app.add_routes([web.post("/update_weights_from_disk", never)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    version = PolicyVersion(1, 1, "/volume/v00000001-inc1", tensors=())
    routes = Routes(("stream", "disk"), "http://store:1", 8501)
    begun = time.monotonic()
    try:
        async with open_session({}) as session:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            with pytest.raises(EngineError, match=r"disk: .*; 4\.0 s in all, after stream") as told:
                await HttpEngine(url, session, routes=routes).load(
                    version, flush_cache=False, timeout=4.0
                )
    finally:
        over.set()
        await runner.cleanup()
    assert told.value.fault is Fault.TIMEOUT
    assert time.monotonic() - begun < 6.0
