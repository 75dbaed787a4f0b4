"""A process that was started again is reached only by a new connection, and each is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from areal_weight_sync.engine.http import HttpEngine, open_session


@asynccontextmanager
async def process(port: int = 0) -> AsyncIterator[int]:
    """A server's process; its port, which the next one can take."""

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": "7", "startup_time": 1.0})

    app = web.Application()
    app.router.add_get("/{path:.*}", info)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_connections_when_the_server_is_restarted_then_one_more() -> None:
    async with open_session({}) as session:
        async with process() as port:
            engine = HttpEngine(f"http://127.0.0.1:{port}", session)
            for _ in range(3):
                assert await engine.weight_version() == "7"
            assert engine.connections == 1
            assert await engine.boot_id()
            assert engine.connections == 1
        async with process(port):
            for _ in range(3):
                assert await engine.weight_version() == "7"
            assert engine.connections == 2


async def test_connections_when_two_servers_share_a_session_then_each_has_its_own_count() -> None:
    async with open_session({}) as session, process() as one, process() as other:
        engines = [HttpEngine(f"http://127.0.0.1:{port}", session) for port in (one, other)]
        for engine in engines:
            await engine.weight_version()
        assert [engine.connections for engine in engines] == [1, 1]
