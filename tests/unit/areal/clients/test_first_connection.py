"""The first connection to NATS: it has a deadline, whatever is at the address."""

from __future__ import annotations

import asyncio

import pytest
from tests.ports import free_port

from areal.clients import nats_connection
from areal.errors import Unavailable


async def test_nats_when_nobody_is_there_then_unavailable_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_connection, "_NATS_FIRST_S", 0.5)
    url = f"nats://somebody:secret@127.0.0.1:{free_port()}"
    async with asyncio.timeout(30):
        with pytest.raises(Unavailable, match=r"no answer within .*(?i:connect)") as caught:
            await nats_connection.connect_nats(url, "test")
    assert "secret" not in str(caught.value)


async def test_nats_when_it_accepts_and_says_nothing_then_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_connection, "_NATS_FIRST_S", 0.5)
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable, match=f"nats://127.0.0.1:{port}: no answer within"):
                await nats_connection.connect_nats(f"nats://127.0.0.1:{port}", "test")
    finally:
        for writer in held:
            writer.close()
        server.close()
