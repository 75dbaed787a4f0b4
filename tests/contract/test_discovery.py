"""Every way in which weight-sync learns of inference servers, held to the same promises.

Static entries never change, and are tested where that matters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.contract.discovery_worlds import PORT, WORLDS, Stack, World, running

from areal.config.server_sources import parse_source
from areal.errors import ConfigError, NotFound
from areal_weight_sync.discovery.base import Source
from areal_weight_sync.discovery.sources import make_sources
from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.server_state import ServerRecord


@pytest.fixture(params=WORLDS)
async def stack(request, tmp_path, monkeypatch) -> AsyncIterator[Stack]:
    async with running(WORLDS[request.param](), tmp_path, monkeypatch) as stack:
        yield stack


@pytest.fixture(params=[name for name, world in WORLDS.items() if world.discovers])
async def discovering(request, tmp_path, monkeypatch) -> AsyncIterator[Stack]:
    async with running(WORLDS[request.param](), tmp_path, monkeypatch) as stack:
        yield stack


async def test_newcomer_when_it_appears_then_it_serves_the_current_version(stack):
    await stack.start()
    stack.world.add("10.0.0.1")
    await stack.until_serving("10.0.0.1")
    stack.world.add("10.0.0.2")
    await stack.until_serving("10.0.0.1", "10.0.0.2")
    assert all(engine.version == "0" for engine in stack.engines.values())


async def test_leaver_when_it_vanishes_then_it_drains_and_is_forgotten(stack):
    await stack.start()
    stack.world.add("10.0.0.1")
    stack.world.add("10.0.0.2")
    await stack.until_serving("10.0.0.1", "10.0.0.2")
    leaver = stack.engine("10.0.0.2")
    leaver.requests = 3
    stack.world.remove("10.0.0.2")
    await stack.until_serving("10.0.0.1")
    await stack.until(lambda: len(stack.coordinator.servers()) == 1, "forgotten")
    assert leaver.aborts == 3  # with their partial tokens; they continue elsewhere


async def test_server_when_it_comes_back_then_it_serves_again(stack):
    await stack.start()
    for _ in range(2):
        stack.world.add("10.0.0.1")
        await stack.until_serving("10.0.0.1")
        stack.world.remove("10.0.0.1")
        await stack.until(lambda: not stack.coordinator.servers(), "forgotten")


async def test_source_when_it_is_away_then_its_servers_stay(stack):
    await stack.start()
    stack.world.add("10.0.0.1")
    await stack.until_serving("10.0.0.1")
    stack.world.outage()
    await asyncio.sleep(0.5)
    assert stack.serving() == {"10.0.0.1"}
    stack.world.heal()
    stack.world.add("10.0.0.2")
    await stack.until_serving("10.0.0.1", "10.0.0.2")


async def test_server_of_an_rpc_when_a_source_lists_others_then_it_stays(stack):
    await stack.start()
    stack.coordinator.register("10.0.9.9:1", "http://10.0.9.9:1")
    stack.world.add("10.0.0.1")
    await stack.until_serving("10.0.0.1", "10.0.9.9")
    stack.world.remove("10.0.0.1")
    await stack.until_serving("10.0.9.9")


async def test_discovered_server_when_it_registers_too_then_it_still_leaves_with_its_source(stack):
    await stack.start()
    stack.world.add("10.0.0.1")
    await stack.until_serving("10.0.0.1")
    stack.coordinator.register(f"10.0.0.1:{PORT}", f"http://10.0.0.1:{PORT}")
    assert stack.serving() == {"10.0.0.1"}
    stack.world.remove("10.0.0.1")
    await stack.until(lambda: not stack.coordinator.servers(), "forgotten")


async def test_server_that_vanished_when_nobody_watched_then_it_is_forgotten(discovering):
    origin = discovering.world.entry
    discovering.engine("10.0.0.7").down = EngineError(Fault.UNREACHABLE, "cannot connect")
    await discovering.start(ServerRecord(f"10.0.0.7:{PORT}", f"http://10.0.0.7:{PORT}", origin))
    discovering.world.add("10.0.0.1")
    await discovering.until_serving("10.0.0.1")
    await discovering.until(lambda: len(discovering.coordinator.servers()) == 1, "forgotten")


async def test_server_drained_by_hand_when_still_listed_then_it_stays_out(discovering):
    await discovering.start()
    discovering.world.add("10.0.0.1")
    discovering.world.add("10.0.0.2")
    await discovering.until_serving("10.0.0.1", "10.0.0.2")
    discovering.coordinator.drain(f"10.0.0.2:{PORT}", 0.0)
    await discovering.until_serving("10.0.0.1")
    discovering.world.add("10.0.0.3")
    await discovering.until_serving("10.0.0.1", "10.0.0.3")
    # A listing that lacks the last to leave lacks both, so it is known when the source told so.
    discovering.world.remove("10.0.0.2")
    discovering.world.remove("10.0.0.1")
    await discovering.until_serving("10.0.0.3")
    discovering.world.add("10.0.0.2")
    await discovering.until_serving("10.0.0.2", "10.0.0.3")


async def test_static_entries_when_one_is_taken_out_then_its_server_is_forgotten(tmp_path):
    class Static(World):
        def sources(self) -> list[Source]:
            return make_sources(["http://10.0.0.1:30000", "http://10.0.0.2:30000"])

    stack = Stack(Static(), tmp_path)
    gone = ServerRecord("10.0.0.3:30000", "http://10.0.0.3:30000", "http://10.0.0.3:30000")
    await stack.start(gone)
    await stack.until_serving("10.0.0.1", "10.0.0.2")
    await stack.until(lambda: len(stack.coordinator.servers()) == 2, "forgotten")
    with pytest.raises(NotFound):
        stack.coordinator.drain("10.0.0.3:30000", 0.0)
    await stack.stop()


@pytest.mark.parametrize(
    "entry",
    [
        "sglang:30000",
        "ftp://sglang:30000",
        "http://",
        "http://host:port",
        "http://host:1/path",
        "dns://sglang",
        "dns://sglang:0",
        "dns://sglang:70000",
        "dns:///sglang:30000",
        "dns://bad name:1",
        "kubernetes://sglang",
        "kubernetes://ns/SGLANG",
        "kubernetes://ns/sglang:0",
        "kubernetes://n.s/sglang",
    ],
)
def test_entry_when_malformed_then_one_line_names_it(entry):
    with pytest.raises(ConfigError, match=r"endpoints\.inference .*expected") as caught:
        parse_source(entry)
    assert repr(entry) in str(caught.value)


def test_entry_when_its_nameserver_is_no_address_then_one_line_names_it():
    with pytest.raises(ConfigError, match="expected an IPv4 address of a nameserver"):
        make_sources(["dns://resolver.local/sglang:30000"])
