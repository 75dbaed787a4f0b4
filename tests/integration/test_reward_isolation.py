"""What a reward leaves behind, and the limits that it would like to lift."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry
from tests.daemons import SOURCE, Daemon
from tests.service_process import ServiceProcess, service_process
from tests.waiting import until

from areal.chassis.interceptors import CallInterceptor
from areal.clients.reward import RewardClient
from areal.protocol.scores import ScoreError, ScoreFailure, ScoreItem
from areal.v1 import buffer_service_pb2, buffer_service_pb2_grpc

RECIPE = (
    SOURCE
    + """
import os, resource, subprocess, sys

def leave(completion, note):
    leave_daemon(note)
    if completion == "exit": os._exit(3)
    return 1.0

def leave_short_lived(completion, **data):
    os.system("true & true & true &")
    return 1.0

def raise_limit(completion, **data):
    if os.geteuid() == 0: os.setuid(65534)  # root may raise any limit
    try:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    except (ValueError, OSError):
        pass
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    bytearray(400 << 20)
    return 1.0

def limit_of_child(completion, **data):
    ask = "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[1])"
    return float(subprocess.check_output([sys.executable, "-c", ask]))

def forge(completion, **data):
    import __main__
    from areal.v1 import reward_service_pb2 as pb
    __main__.outcome = lambda *_: pb.ScoreResult(reward=100.0)
    return 1.0

def honest(completion, **data): return 0.5
"""
).encode()
OTHER = b"def honest(completion, **data): return 0.25\n"
DIGEST, OTHER_DIGEST = (hashlib.sha256(each).hexdigest() for each in (RECIPE, OTHER))


class Recipes(buffer_service_pb2_grpc.BufferServiceServicer):
    """The ledger's recipe store."""

    async def GetRecipe(self, request, context):
        return buffer_service_pb2.GetRecipeResponse(
            file_name="my_recipe.py", source={DIGEST: RECIPE, OTHER_DIGEST: OTHER}[request.digest]
        )


@asynccontextmanager
async def rewards(
    folder: Path, *overrides: str
) -> AsyncIterator[tuple[ServiceProcess, RewardClient]]:
    server = grpc.aio.server(interceptors=[CallInterceptor("buffer", CollectorRegistry())])
    buffer_service_pb2_grpc.add_BufferServiceServicer_to_server(Recipes(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = f"endpoints:\n  buffer: 127.0.0.1:{port}\n"
    try:
        async with service_process("areal_reward", folder, config, *overrides) as service:
            client = RewardClient(service.listen)
            try:
                yield service, client
            finally:
                await client.close()
    finally:
        await server.stop(0)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    left = Daemon(tmp_path / "daemon")
    yield left
    left.clean_up()


async def test_daemon_when_its_worker_ends_then_it_ends_too(tmp_path: Path, daemon: Daemon) -> None:
    data = {"note": str(tmp_path / "daemon")}
    async with rewards(tmp_path, "reward.timeout_s=60") as (service, client):
        (crashed,) = await client.score("leave", DIGEST, {}, [ScoreItem("p", "exit", data=data)])
        assert isinstance(crashed, ScoreFailure)
        assert crashed.error is ScoreError.CRASH
        await until(daemon.left, "the daemon", 30.0)
        await until(lambda: not daemon.lives(), "the end of the daemon", 60.0)
        # The other workers are not taken for one.
        assert await client.score("honest", DIGEST, {}, [ScoreItem("p", "x")]) == [0.5]
        assert psutil.pid_exists(service.pid)


async def test_daemon_when_the_service_ends_then_it_ends_too(
    tmp_path: Path, daemon: Daemon
) -> None:
    data = {"note": str(tmp_path / "daemon")}
    async with rewards(tmp_path, "reward.workers=2") as (service, client):
        items = [ScoreItem("p", "x", data=data)]
        assert await client.score("leave", DIGEST, {}, items) == [1.0]
        await until(daemon.left, "the daemon", 30.0)
        assert daemon.lives()
        assert await service.stop(signal.SIGTERM) == 0
        assert not daemon.lives()


async def test_strays_when_they_end_by_themselves_then_no_zombie_is_left(tmp_path: Path) -> None:
    async with rewards(tmp_path) as (service, client):

        def zombies() -> int:
            children = psutil.Process(service.pid).children()
            return sum(child.status() == psutil.STATUS_ZOMBIE for child in children)

        for _ in range(5):
            assert await client.score("leave_short_lived", DIGEST, {}, [ScoreItem("p", "x")]) == [1]
        for _ in range(100):
            await client.score("honest", DIGEST, {}, [ScoreItem("p", "x")])
            if not zombies():
                break
            await asyncio.sleep(0.05)
        assert zombies() == 0


async def test_memory_when_a_reward_raises_its_own_limit_then_it_holds_all_the_same(
    tmp_path: Path,
) -> None:
    async with rewards(tmp_path, "reward.memory_mb=128") as (_, client):
        (limit,) = await client.score("limit_of_child", DIGEST, {}, [ScoreItem("p", "x")])
        assert isinstance(limit, float)
        assert 0 < limit < 2 << 30, "a child has the same limit"
        (refused,) = await client.score("raise_limit", DIGEST, {}, [ScoreItem("p", "x")])
        assert isinstance(refused, ScoreFailure)
        assert refused.error is ScoreError.CRASH
        assert "ran out of memory: reward.memory_mb = 128" in refused.message


async def test_scores_when_a_reward_forges_them_then_no_other_recipe_is_touched(
    tmp_path: Path,
) -> None:
    async with rewards(tmp_path) as (_, client):
        item = [ScoreItem("p", "x")]
        await client.score("forge", DIGEST, {}, item)
        assert await client.score("honest", OTHER_DIGEST, {}, item) == [0.25]
