"""What the suites here share: a buffer service, an inference server, a weight-sync."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.containers import ContainerStore, image_of
from tests.inference_server import make_model, running_server, save_tokenizer
from tests.integration.inference_http import Served, post
from tests.integration.weight_sync_rig import BadServer, Process, WeightSyncRig, inference
from tests.nats_server import NatsServer
from tests.redis_server import RedisServer, start_redis

from areal.clients.redis_connection import connect_redis

# -- the buffer -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def buffer_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the Redis behind `buffer`, which empties it."""
    with start_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def buffer_address(buffer_redis: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    overrides = (
        "train_dataset.batch_size=2",
        "rollout.lease_ttl_s=1",
    )
    with start_buffer(tmp_path_factory.mktemp("buffer"), buffer_redis, *overrides) as address:
        yield address


@pytest.fixture
async def buffer(buffer_redis: str, buffer_address: str) -> AsyncIterator[BufferClient]:
    """A client of an empty ledger, in a service that all tests of it share."""
    connection = connect_redis(buffer_redis)
    await connection.flushdb()
    await connection.aclose()
    opened = BufferClient(buffer_address)
    try:
        yield opened
    finally:
        await opened.close()


# -- an inference server ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of its protocol."""
    root = tmp_path_factory.mktemp("models")
    model = make_model(root / "a", seed=1, max_position_embeddings=8192)
    save_tokenizer(root / "a")
    make_model(root / "b", seed=2, max_position_embeddings=8192)
    make_model(root / "wrong", vocab_size=137)
    with running_server(root / "a", "--max-running-requests", "32", "--random-seed", "3") as server:
        yield Served(server.url, root / "a", root / "b", root / "wrong", model)


@pytest.fixture
async def http(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(served.url, timeout=timeout) as session:
        yield session
        # Whatever a test did, the next one finds the first model, not paused.
        await post(session, "/continue_generation", {})
        await post(session, "/abort_request", {"abort_all": True})
        body = {"model_path": str(served.folder), "weight_version": "default"}
        assert (await post(session, "/update_weights_from_disk", body))[0] == 200


# -- weight-sync ------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def nats_server(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[NatsServer | ContainerStore]:
    """A process; with the parameter "deployed" a container, where there is an engine."""
    in_container = getattr(request, "param", "") == "deployed" and image_of("nats")
    server = ContainerStore("nats") if in_container else NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def rig(
    tmp_path: Path, redis: RedisServer, nats_server: NatsServer, tiny_model: Path
) -> AsyncIterator[WeightSyncRig]:
    """A weight-sync with stores of its own, at version 0."""
    rig = WeightSyncRig(tmp_path, redis.url, nats_server.url, tiny_model, probe_interval_s=0.2)
    try:
        await rig.started()
        yield rig
    finally:
        await rig.close()


@pytest.fixture
async def bad() -> AsyncIterator[BadServer]:
    """A server that misbehaves on demand."""
    server = BadServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def good(
    rig: WeightSyncRig, tmp_path: Path, tiny_model: Path
) -> AsyncIterator[tuple[Process, str]]:
    """A real engine, known to the rig; and its url."""
    process, url = inference(tmp_path, tiny_model, "inference-good")
    process.start()
    await rig.client.register_server(url)
    yield process, url
    process.kill()
