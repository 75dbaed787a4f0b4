"""The pool of connections to Redis, against a real one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.redis_server import RedisServer

from areal.clients.redis_connection import connect_redis


async def test_commands_when_more_than_connections_then_they_wait(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    client = connect_redis(server.url, max_connections=2)
    try:
        counts = await asyncio.gather(*(client.incr("n") for _ in range(50)))
    finally:
        await client.aclose()
        server.kill()

    assert sorted(counts) == list(range(1, 51))
