"""Whose fault a late answer is: the server's, or that of a weight-sync that had no time itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.engine.http import HttpEngine, open_session
from areal_weight_sync.engine.probing import ask_version

ANSWER = b'{"weight_version": "7"}'
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER


@asynccontextmanager
async def silent(times: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that leaves so many requests without an answer; its url, and what it was asked."""
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            asked.append(1)
            if len(asked) > times:
                writer.write(REPLY)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def test_probe_when_this_process_stood_still_then_the_server_is_asked_again() -> None:
    async with silent(1) as (url, asked), open_session({}) as session:
        engine = HttpEngine(url, session)
        asyncio.get_running_loop().call_later(0.2, time.sleep, 1.5)
        assert await ask_version(engine, 0.5, lambda: False, url) == "7"
    assert len(asked) == 2


async def test_probe_when_only_the_server_is_silent_then_a_timeout_at_the_second() -> None:
    async with silent(9) as (url, asked), open_session({}) as session:
        engine = HttpEngine(url, session)
        with pytest.raises(EngineError) as caught:
            await ask_version(engine, 1.0, lambda: False, url)
    assert caught.value.fault is Fault.TIMEOUT
    # On a starved machine this process may have been late by itself, and have asked again.
    assert 2 <= len(asked) <= 5


async def test_probe_when_this_process_stands_still_all_the_time_then_not_for_ever() -> None:
    async with silent(9) as (url, asked), open_session({}) as session:
        engine = HttpEngine(url, session)
        loop = asyncio.get_running_loop()

        def stand_still() -> None:
            time.sleep(0.9)
            nonlocal handle
            handle = loop.call_later(0.05, stand_still)

        handle = loop.call_soon(stand_still)
        try:
            with pytest.raises(EngineError, match="no answer"):
                await ask_version(engine, 0.2, lambda: False, url)
        finally:
            handle.cancel()
    assert len(asked) <= 5
