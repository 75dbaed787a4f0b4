"""Processes from before and after a rotation of the token reach each other, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from tests.ports import free_port

from areal.chassis.service import Server, ServiceContext, listen_in
from areal.clients.http_token import or_else
from areal.clients.rollout import RolloutClient
from areal.clients.trainer import TrainerClient
from areal.errors import Unauthenticated
from areal.runs.status import TrainerStatus
from areal.security import Security
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc
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
