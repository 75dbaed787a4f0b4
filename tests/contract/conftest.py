"""The engines of the conformance suite: ours always, SGLang with `make test-sglang`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.contract.engines import EngineUnderTest, Http, running_engine
from tests.contract.transport_rig import Rig, open_rig
from tests.inference_server import make_model, save_tokenizer

ENGINES = ["embedded", "real"] if os.environ.get("AREAL_TEST_SGLANG") else ["embedded"]
VERSIONS = 4


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Any]]:
    """Folders and models of versions 0, 1, …: all different."""
    root = tmp_path_factory.mktemp("versions")
    folders = [root / str(index) for index in range(VERSIONS)]
    models = []
    for index, folder in enumerate(folders):
        folder.mkdir()
        models.append(make_model(folder, seed=20 + index, max_position_embeddings=8192))
        save_tokenizer(folder)
    return folders, models


@pytest.fixture(scope="session", params=ENGINES)
def engine(
    request: pytest.FixtureRequest,
    versions: tuple[list[Path], list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineUnderTest]:
    """One server for the whole suite."""
    log = tmp_path_factory.mktemp("engine") / "server.log"
    with running_engine(request.param, *versions, log) as running:
        yield running


@pytest.fixture
async def http(engine: EngineUnderTest) -> AsyncIterator[Http]:
    """The server at version 0; afterwards nothing runs and nothing is paused."""
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(engine.url, timeout=timeout) as session:
        calls = Http(engine, session)
        yield calls
        await calls.ok("/abort_request", {"abort_all": True})
        await calls.resume()
        await calls.until(lambda load: not load["num_running_reqs"] + load["num_waiting_reqs"])
        await calls.until_updated(0)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """What transports are driven with."""
    async with open_rig(tmp_path) as opened:
        yield opened
