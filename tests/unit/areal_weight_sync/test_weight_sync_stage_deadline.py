"""How long a server waits for another one that takes a version."""

from __future__ import annotations

import asyncio

from aiohttp import web
from tests.ports import free_port

from areal.weights.manifest import PolicyVersion
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
