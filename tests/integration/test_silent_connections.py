"""Connections that say nothing, or half of a request: they keep no one else out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.inference_server import make_model, running_server
from tests.ports import free_port
from tests.service_process import service_process

from areal.chassis.http_connections import HEAD_WITHIN_S
from areal.security import Security
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.weights import WeightStore

pytestmark = [pytest.mark.timeout(240)]

TOKEN = "correct-horse-battery-staple"
STRANGERS = 300
FEW_DESCRIPTORS = ("sh", "-c", 'ulimit -n 256 && exec "$0" "$@"')
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = WHOLE[:30]
# Of a request that anybody may send: its head is whole, its body does not come.
NO_FORM = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n\r\ntok"
# The machine may be slow; a server without a deadline would take much longer.
WITHIN_S = HEAD_WITHIN_S + 35.0


class Stranger:
    """A connection that sends what it is told, and then waits."""

    def __init__(self, address: str, said: bytes = b"", then: bytes = b"") -> None:
        """`then`: is sent once `said` has been answered."""
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 20)
        with contextlib.suppress(ConnectionError):  # hung up on at once
            self._socket.sendall(said)
            if then:
                assert self._socket.recv(4096)
                self._socket.sendall(then)

    async def trickle(self) -> None:
        """Sends a letter now and then, until the server has closed."""
        since = time.monotonic()
        with contextlib.closing(self._socket), contextlib.suppress(ConnectionError):
            while time.monotonic() - since < WITHIN_S:
                self._socket.sendall(b"x")
                await asyncio.sleep(0.5)  # the letters' pace, not a wait for something
            raise TimeoutError("letters were taken all the time")
        assert time.monotonic() - since > 1.0, "an honest one needs a moment, too"

    async def hung_up(self) -> None:
        """Returns when the server has closed; TimeoutError when it does not."""
        self._socket.settimeout(WITHIN_S)
        with contextlib.suppress(ConnectionError):
            while await asyncio.to_thread(self._socket.recv, 4096):
                pass
        self._socket.close()

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def strangers(address: str, said: bytes) -> AsyncIterator[None]:
    """Many at once, for as long as this lasts."""
    there: list[Stranger] = []
    try:
        for _ in range(STRANGERS):
            there.append(await asyncio.to_thread(Stranger, address, said))
        yield
    finally:
        for each in there:
            each.close()


async def status(url: str) -> int:
    """Of an answer over a connection of its own, as a probe makes one: soon."""
    deadline = aiohttp.ClientTimeout(total=HEAD_WITHIN_S / 2)
    async with aiohttp.ClientSession(timeout=deadline) as http, http.get(url) as reply:
        return reply.status


@pytest.mark.parametrize("said", [b"", HALF], ids=["silent", "half a request"])
@pytest.mark.parametrize("port", ["listen", "metrics"])
async def test_gateway_when_more_strangers_wait_than_it_has_descriptors_then_others_are_served(
    tmp_path: Path, port: str, said: bytes
) -> None:
    async with service_process(
        "areal_gateway", tmp_path, "experiment_name: silent\n", before=FEW_DESCRIPTORS
    ) as service:
        async with strangers(getattr(service, port), said):
            for address in (service.listen, service.metrics):
                assert await status(f"http://{address}/healthz") == 200
        assert "Too many open files" not in service.text()


async def test_gateway_when_no_whole_request_comes_then_it_hangs_up(tmp_path: Path) -> None:
    async with service_process(
        "areal_gateway",
        tmp_path,
        "experiment_name: silent\n",
        environment={"AREAL_TOKEN": TOKEN},
    ) as service:
        there = [Stranger(service.listen, NO_FORM)]
        for address in (service.listen, service.metrics):
            there += [Stranger(address), Stranger(address, HALF), Stranger(address, WHOLE, HALF)]
        slow = [Stranger(address, HALF) for address in (service.listen, service.metrics)]
        await asyncio.gather(
            *(each.hung_up() for each in there), *(each.trickle() for each in slow)
        )


async def test_inference_when_no_whole_request_comes_then_it_hangs_up(tmp_path: Path) -> None:
    make_model(tmp_path)
    with running_server(tmp_path) as server:
        silent, half = Stranger(server.url), Stranger(server.url, HALF)
        await asyncio.gather(silent.hung_up(), half.hung_up())


async def test_weight_store_when_no_whole_request_comes_then_it_hangs_up(tmp_path: Path) -> None:
    app = StoreApp(WeightStore(tmp_path, tmp_path), list, lambda: None, Security())
    port = free_port()
    await app.start("127.0.0.1", port)
    try:
        address = f"127.0.0.1:{port}"
        silent, half = Stranger(address), Stranger(address, HALF)
        await asyncio.gather(silent.hung_up(), half.hung_up())
    finally:
        await app.close()


async def test_grpc_when_more_strangers_wait_than_it_has_descriptors_then_others_are_served(
    tmp_path: Path,
) -> None:
    async with service_process(
        "areal_reward", tmp_path, "experiment_name: silent\n", before=FEW_DESCRIPTORS
    ) as service:
        silent = Stranger(service.listen)
        async with strangers(service.listen, b""):
            assert await status(f"http://{service.metrics}/healthz") == 200
            async with grpc.aio.insecure_channel(service.listen) as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=WITHIN_S, wait_for_ready=True
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await silent.hung_up()
