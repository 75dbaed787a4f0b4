import asyncio
import resource
import subprocess
import sys
import time
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from tests.waiting import until

from areal.errors import WaitTimeout
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal.weights.servers import InferenceServer, ServerState
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.connections import Connections
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable


@dataclass
class Counting:
    """A server that answers after a moment and remembers how many requests it had at once."""

    now: int = 0
    most: int = 0
    aborted: list = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def _counted(self):
        self.now += 1
        self.most = max(self.most, self.now)
        yield
        self.now -= 1

    async def generate(self, _):
        async with self._counted():
            await self.open.wait()
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
            "output_token_logprobs": [[-1.0, 7, None]],
        }
        return web.json_response({"output_ids": [7], "meta_info": meta})

    async def abort(self, request):
        async with self._counted():
            await asyncio.sleep(0.005)
        self.aborted.append((await request.json())["rid"])
        return web.Response()


@pytest.fixture
async def server():
    counting = Counting()
    app = web.Application()
    app.add_routes(
        [web.post("/generate", counting.generate), web.post("/abort_request", counting.abort)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    counting.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield counting
    counting.open.set()
    await runner.cleanup()


class Observer:
    def request_done(self, seconds, tokens):
        pass

    def interruption(self, kind):
        raise AssertionError(kind)

    salvaged = request_done


async def test_generate_when_more_than_connections_then_the_rest_waits_and_no_server_is_blamed(
    server,
):
    blamed = []

    async def report(url, cause):
        blamed.append(cause)

    table = ServerTable()
    table.update([InferenceServer("s", server.url, ServerState.SERVING, 0, "")])
    client = SGLangClient(
        table,
        ModelLimits(100, 100),
        report=report,
        observer=Observer(),
        request_timeout_s=60.0,
        setup_timeout_s=60.0,
        connections=3,
    )
    await client.start()
    request = LLMRequest([1], GenerationHyperparameters(max_new_tokens=4))
    answers = [LLMResponse([1], [], [], [], StopReason.ABORT) for _ in range(10)]
    running = [asyncio.create_task(client.generate(request, [answer])) for answer in answers]
    while server.now < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert server.now == 3
    server.open.set()
    await asyncio.wait_for(asyncio.gather(*running), 30)
    await client.close()
    assert [answer.output_tokens for answer in answers] == [[7]] * 10
    assert (server.most, blamed) == (3, [])


async def test_calm_when_a_burst_connects_then_few_do_at_once_and_who_would_bring_more_waits(
    server,
):
    connections = Connections({}, 1000)
    await connections.open()
    await connections.calm(10.0)  # nothing is continuing
    opened, connecting, most = asyncio.Event(), 0, 0
    create = connections._connector._create_connection

    async def slow(*args, **kwargs):
        nonlocal connecting, most
        connecting += 1
        most = max(most, connecting)
        await opened.wait()
        connecting -= 1
        return await create(*args, **kwargs)

    connections._connector._create_connection = slow

    async def post():
        async with connections.session.post(f"{server.url}/abort_request", json={"rid": "1"}):
            pass

    burst = [asyncio.create_task(post()) for _ in range(200)]
    while most < 64:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    began = asyncio.get_running_loop().time()
    await connections.calm(0.1)
    assert asyncio.get_running_loop().time() - began >= 0.09
    opened.set()
    await connections.calm(60.0)
    await asyncio.gather(*burst)
    await connections.close()
    assert most == 64
    assert len(server.aborted) == 200


async def test_connect_when_this_process_stood_still_then_tried_again_before_a_server_is_blamed(
    monkeypatch,
):
    monkeypatch.setattr("areal_rollout.generation.connections._CONNECT_S", 0.3)
    tries, left = [], []
    create = asyncio.get_running_loop().create_connection

    async def handle(reader, writer):
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await reader.read()  # until the client has left
        writer.close()
        await writer.wait_closed()
        left.append(1)

    async def slow(*args, sock, **kwargs):
        tries.append(1)
        if len(tries) == 1:  # this process has no time: its timer is late as well
            asyncio.get_running_loop().call_soon(time.sleep, 1.5)
            with closing(sock):
                await asyncio.Event().wait()
        return await create(*args, sock=sock, **kwargs)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", slow)
    silent = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/"
    connections = Connections({}, 10)
    await connections.open()
    async with connections.session.get(url) as answer:
        assert answer.status == 200
    assert len(tries) == 2
    await connections.close()
    await until(lambda: len(left) == 2, "both connections to be closed")
    silent.close()


async def test_take_when_none_becomes_free_then_says_whom_it_waited_for():
    connections = Connections({}, 1)
    now = asyncio.get_running_loop().time()
    await connections.take(now + 60)
    with pytest.raises(WaitTimeout, match=r"a free connection.*1 running requests.*ulimit -n"):
        await connections.take(now + 0.05)
    connections.free()
    await connections.take(now + 60)


async def test_abort_when_thousands_at_once_then_few_connections_and_all_arrive(server):
    connections = Connections({}, 1)
    await connections.open()
    await asyncio.gather(
        *(connections.abort(f"{server.url}/abort_request", str(i)) for i in range(300))
    )
    await connections.close()
    assert sorted(map(int, server.aborted)) == list(range(300))
    assert server.most <= 64


def test_open_files_when_the_soft_limit_is_lower_then_it_is_raised_to_the_hard_one():
    script = (
        "import resource; from areal.chassis.process import open_files;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700));"
        "print(open_files(), open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[4] / "services",
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == ["700"] * 4, result.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 700
