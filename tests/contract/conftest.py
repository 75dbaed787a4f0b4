"""What the suites here share: engines (SGLang with `make test-sglang`), transports, ledgers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.containers import image_of, store_in_container
from tests.contract.engines import ENGINES, EngineUnderTest, Http, make_versions, running_engine
from tests.contract.transport_rig import Rig, open_rig
from tests.ledger_support import Book, open_book
from tests.redis_server import start_redis

VERSIONS = 4


Versions = Callable[[str], tuple[list[Path], list[Any]]]


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Makes the folders and models of versions 0, 1, … for an engine, once."""

    @cache
    def made(name: str) -> tuple[list[Path], list[Any]]:
        return make_versions(name, tmp_path_factory.mktemp(f"versions-{name}"), VERSIONS)

    return made


@pytest.fixture(scope="session", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, versions: Versions, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    """One server for the whole suite."""
    log = tmp_path_factory.mktemp("engine") / "server.log"
    with running_engine(request.param, *versions(request.param), log) as running:
        yield running


@pytest.fixture
async def http(engine: EngineUnderTest) -> AsyncIterator[Http]:
    """The server at version 0; afterwards nothing runs and nothing is paused."""
    timeout = aiohttp.ClientTimeout(total=100)
    # SGLang closes a connection after 5 idle seconds, perhaps just when a call is sent on it.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(engine.url, timeout=timeout, connector=connector) as session:
        calls = Http(engine, session)
        yield calls
        await calls.ok("/abort_request", {"abort_all": True})
        await calls.resume()
        await calls.until(lambda load: not load["num_running_reqs"] + load["num_waiting_reqs"])
        await calls.until_updated(0)


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one Redis for every file; a ledger in it has a name of its own."""
    with start_redis(tmp_path_factory.mktemp("ledger")) as url:
        yield url


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A Redis as it is deployed: in a container where there is an engine, else `redis_process`."""
    if not image_of("redis"):
        yield request.getfixturevalue("redis_process")
        return
    with store_in_container("redis") as url:
        yield url


@pytest.fixture
async def book(redis_url: str) -> AsyncIterator[Book]:
    """An empty ledger."""
    async with open_book(redis_url) as opened:
        yield opened


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """What transports are driven with."""
    async with open_rig(tmp_path) as opened:
        yield opened
