"""Processes from before and after a rotation of the token reach each other, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from tests.ports import free_port

from areal.chassis.service import Server, ServiceContext, listen_in
from areal.clients.http_token import or_else
from areal.clients.rollout import RolloutClient
from areal.clients.trainer import TrainerClient
from areal.errors import ConfigError, Unauthenticated
from areal.runs.status import TrainerStatus
from areal.security import Security, SecurityConfig
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc
from areal.weights.publisher import TransportError
from areal.weights.store_client import StoreConnection
from areal_trainer.server import TrainerServer
from areal_trainer.servicer import TrainerService

OLD, NEW, OTHER = "the-token-of-yesterday", "the-token-of-today", "the-token-of-no-one"
BEFORE = Security(token=OLD)
AFTER = Security(token=NEW, previous_token=OLD)
DONE = Security(token=NEW)
# (server, client, whether the client gets in)
PAIRS = [
    (BEFORE, BEFORE, True),
    (BEFORE, AFTER, True),
    (BEFORE, DONE, False),
    (AFTER, BEFORE, True),
    (AFTER, AFTER, True),
    (AFTER, DONE, True),
    (DONE, BEFORE, False),
    (DONE, AFTER, True),
    (AFTER, Security(token=OTHER), False),
    (AFTER, Security(token=OTHER, previous_token=OTHER), False),
    (AFTER, Security(), False),
]


@asynccontextmanager
async def served(security: Security, server: Server) -> AsyncIterator[str]:
    address = f"127.0.0.1:{free_port()}"
    context = ServiceContext("trainer", address, None, security)
    listeners = await listen_in(context, server, "")
    try:
        yield address
    finally:
        await listeners.stop(0)


@pytest.mark.parametrize(("theirs", "ours", "admitted"), PAIRS)
async def test_call_when_the_token_is_rotated_then_both_sides_accept_the_previous(
    theirs: Security, ours: Security, admitted: bool
) -> None:
    server = TrainerServer(TrainerService(TrainerStatus(10, 1)))
    async with served(theirs, server) as address:
        client = TrainerClient(address, ours)
        try:
            if admitted:
                assert (await client.get_status(0)).total_steps == 10
            else:
                with pytest.raises(Unauthenticated):
                    await client.get_status(0)
        finally:
            await client.close()


class Watched(pb_grpc.RolloutServiceServicer):
    async def WatchTasks(self, request, context):
        yield pb.WatchTasksResponse()
        yield pb.WatchTasksResponse()


class WatchedServer(Server):
    def registrations(self):
        def add(server):
            pb_grpc.add_RolloutServiceServicer_to_server(Watched(), server)

        return [("areal.v1.RolloutService", add)]


@pytest.mark.parametrize(("theirs", "ours", "admitted"), PAIRS)
async def test_stream_when_the_token_is_rotated_then_each_message_comes_once(
    theirs: Security, ours: Security, admitted: bool
) -> None:
    async with served(theirs, WatchedServer()) as address:
        client = RolloutClient(address, ours)
        try:
            stream = client.stream(client._stub.WatchTasks, pb.WatchTasksRequest(), timeout_s=30.0)
            if admitted:
                assert len([message async for message in stream]) == 2
            else:
                with pytest.raises(Unauthenticated):
                    await anext(stream)
        finally:
            await client.close()


async def test_stream_when_left_early_then_its_call_ends_with_it() -> None:
    async with served(AFTER, WatchedServer()) as address:
        client = RolloutClient(address, AFTER)
        calls = []

        def method(*arguments, **options):
            calls.append(client._stub.WatchTasks(*arguments, **options))
            return calls[-1]

        method._method = client._stub.WatchTasks._method
        try:
            stream = client.stream(method, pb.WatchTasksRequest(), timeout_s=30.0)
            await anext(stream)
            await stream.aclose()
            assert [call.done() for call in calls] == [True]
        finally:
            await client.close()


@pytest.mark.parametrize(("theirs", "ours", "admitted"), PAIRS)
async def test_http_request_when_the_token_is_rotated_then_its_body_arrives_once(
    theirs: Security, ours: Security, admitted: bool
) -> None:
    bodies = []

    async def take(request: web.Request) -> web.Response:
        if not theirs.admits(request.headers.get("Authorization")):
            return web.Response(status=401)
        bodies.append(await request.json())
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/generate", take)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with ClientSession(
            headers=ours.headers(), middlewares=or_else(ours.previous_headers())
        ) as http:
            url = f"http://127.0.0.1:{port}/generate"
            for _ in range(2):
                async with http.post(url, json={"text": "x" * 100_000}) as reply:
                    assert reply.status == (200 if admitted else 401)
    finally:
        await runner.cleanup()
    assert len(bodies) == (2 if admitted else 0)


def test_headers_when_no_token_is_rotated_then_there_is_no_second_try() -> None:
    assert or_else(DONE.previous_headers()) == ()


def written(folder: Path, token: str, previous: str = "") -> Security:
    """A process that has read these files."""
    for name, value in {"token": token, "token-previous": previous}.items():
        (folder / name).unlink(missing_ok=True)
        if value:
            (folder / name).write_text(value)
    return Security.load(SecurityConfig(dir=str(folder)), {})


async def test_stream_when_the_clients_files_get_another_token_then_it_presents_that(
    tmp_path: Path,
) -> None:
    ours = written(tmp_path, OLD)
    async with served(DONE, WatchedServer()) as address:
        client = RolloutClient(address, ours)
        try:
            written(tmp_path, NEW)
            for _ in range(2):
                stream = client.stream(
                    client._stub.WatchTasks, pb.WatchTasksRequest(), timeout_s=30.0
                )
                assert len([message async for message in stream]) == 2
        finally:
            await client.close()
    assert ours == DONE


async def test_calls_when_several_are_refused_at_once_then_each_presents_the_new_token(
    tmp_path: Path,
) -> None:
    """The trainer of a cluster continues while the token is rotated, and afterwards."""
    ours = written(tmp_path, OLD)
    async with served(DONE, TrainerServer(TrainerService(TrainerStatus(10, 1)))) as address:
        client = TrainerClient(address, ours)
        try:
            written(tmp_path, NEW)
            answers = await asyncio.gather(*(client.get_status(0) for _ in range(5)))
        finally:
            await client.close()
    assert [answer.total_steps for answer in answers] == [10] * 5


async def test_server_when_its_files_get_another_token_then_it_admits_that(tmp_path: Path) -> None:
    theirs = written(tmp_path, OLD)
    async with served(theirs, TrainerServer(TrainerService(TrainerStatus(10, 1)))) as address:
        written(tmp_path, NEW, OLD)
        for ours in (DONE, BEFORE):
            client = TrainerClient(address, ours)
            try:
                assert (await client.get_status(0)).total_steps == 10
            finally:
                await client.close()


@pytest.mark.parametrize("content", ["", "short", "two words of a token", None])
def test_files_when_they_hold_no_token_then_the_one_before_stays(
    tmp_path: Path, content: str | None
) -> None:
    ours = written(tmp_path, OLD)
    (tmp_path / "token").unlink()
    if content is not None:
        (tmp_path / "token").write_text(content)
    assert not ours.admits(f"Bearer {NEW}")
    assert ours.admits(f"Bearer {OLD}")
    assert ours.untried([OLD]) == ""


def test_files_when_strangers_send_wrong_tokens_then_they_are_read_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = written(tmp_path, OLD)
    clock = [100.0]
    monkeypatch.setattr("areal.security.time.monotonic", lambda: clock[0])
    assert not ours.admits(f"Bearer {OTHER}")
    written(tmp_path, NEW)
    assert not any(ours.admits(f"Bearer {OTHER}") for _ in range(100))
    assert not ours.admits(f"Bearer {NEW}")
    clock[0] += 1.0
    assert ours.admits(f"Bearer {NEW}")
    assert not ours.admits(f"Bearer {OLD}")


def test_folder_when_the_environment_names_it_then_its_token_is_read(tmp_path: Path) -> None:
    written(tmp_path, NEW, OLD)
    given = {"AREAL_SECURITY_DIR": str(tmp_path), "AREAL_TOKEN": OTHER}
    assert Security.load(SecurityConfig(), given) == AFTER
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=rf"AREAL_SECURITY_DIR '{empty}': expected a folder"):
        Security.load(SecurityConfig(), {"AREAL_SECURITY_DIR": str(empty)})


def test_weight_store_when_the_files_get_another_token_then_the_upload_is_sent_with_that(
    tmp_path: Path,
) -> None:
    ours, asked = written(tmp_path, OLD), []

    class Store(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = DONE.admits(self.headers["Authorization"])
            asked.append((known, body))
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            connection = StoreConnection(url, ours.headers(), 30.0, untried=ours.untried)
            with connection as store:
                with pytest.raises(TransportError, match="HTTP 401"):
                    store.begin("v00000001-inc1", "refused")
                ours._looked = 0.0
                written(tmp_path, NEW)
                for text in ("one", "two"):
                    store.begin("v00000001-inc1", text)
        finally:
            server.shutdown()
    assert asked == [(False, b"refused"), (False, b"one"), (True, b"one"), (True, b"two")]
