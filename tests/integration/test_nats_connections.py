"""The client of NATS when the server goes away: it comes back by itself, and does not hammer."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from tests.nats_server import NatsServer
from tests.waiting import until

from areal.chassis.backoff import Backoff
from areal.clients import nats_connection


class Pauses(Backoff):
    """Remembers the pauses it gave since the last success."""

    given: list[float]

    def __init__(self) -> None:
        super().__init__(0.05, 0.4)
        self.given = []

    def next(self) -> float:
        self.given.append(super().next())
        return self.given[-1]

    def reset(self) -> None:
        super().reset()
        self.given.clear()


async def test_nats_when_it_comes_back_then_so_do_we_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = Pauses()
    monkeypatch.setattr(nats_connection, "Backoff", lambda: pauses)
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        with structlog.testing.capture_logs() as logs:
            client = await nats_connection.connect_nats(server.url, "test")
            got = await client.subscribe("news")
            server.kill()
            await until(lambda: len(pauses.given) >= 6, "six tries")
            assert pauses.given[0] <= 0.05 < 0.2 <= pauses.given[5] <= 0.4
            assert not client.is_closed
            server.start()
            await until(lambda: client.is_connected, "the server")
            await client.publish("news", b"here again")
            assert (await got.next_msg(timeout=60)).data == b"here again"
            assert not pauses.given
        told = [line["event"] for line in logs]
        assert told.count("nats_disconnected") == 1
        assert told[-1] == "nats_reconnected"
        await client.close()
    finally:
        server.kill()


async def test_nats_when_several_are_given_then_another_takes_over(tmp_path: Path) -> None:
    servers = [NatsServer(tmp_path / name) for name in "ab"]
    for server in servers:
        server.start()
    try:
        client = await nats_connection.connect_nats(
            ", ".join(server.url for server in servers), "test"
        )
        first = next(each for each in servers if str(each.port) in client.connected_url.netloc)
        first.kill()
        await until(
            lambda: client.is_connected and str(first.port) not in client.connected_url.netloc,
            "the other one",
        )
        await client.publish("news", b"here")
        await client.flush()
        await client.close()
    finally:
        for server in servers:
            server.kill()
