"""What of a server that left, failed or waits still counts, and what does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.areal_weight_sync.coordinator_rig import QUARANTINED, SERVING, rig_of
from tests.unit.areal_weight_sync.test_weight_sync_broadcast import offer, unstored
from tests.unit.areal_weight_sync.test_weight_sync_staging import serving

from areal.errors import CapacityExceeded, Unavailable
from areal_weight_sync.announcer import Announcer
from areal_weight_sync.engine.base import EngineError, Fault

HANGS = EngineError(Fault.TIMEOUT, "/model_info: no answer within 2.0 s")


async def test_vote_when_the_voters_have_been_drained_then_a_newcomer_is_not_outvoted_by_them(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        for name in ("a", "b"):
            rig.engine(name).holds = "torn"
        await rig.serving("a", "b")
        for name in ("a", "b"):
            rig.coordinator.drain(name, 0.0)
            await rig.until(lambda name=name: rig.server(name) is None, f"{name} forgotten")
        rig.register("c")
        await rig.at("c", SERVING, 0)
        assert rig.observer.failures == []


async def test_group_when_a_member_was_quarantined_since_then_the_next_one_is_new(
    tmp_path: Path,
) -> None:
    """Its end of the connection may be gone, and all others would wait for it."""
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a", "b")
        version, stored = unstored(rig, 1)
        first = await offer(rig, version)
        for name in ("a", "b"):
            await rig.at(name, SERVING, 1)
        await rig.coordinator.publish(stored)
        second, _ = unstored(rig, 2)
        rig.engine("b").down = HANGS
        await rig.at("b", QUARANTINED)
        rig.engine("b").down = None
        await rig.at("b", SERVING, 1)
        seats = await offer(rig, second, first.group)
        assert seats.world_size == 3
        assert seats.group != first.group


async def test_quarantine_when_versions_are_published_then_its_backoff_is_not_cut_short(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path, backoff_s=600.0, backoff_max_s=600.0) as rig:
        await rig.serving("a", "b")
        rig.engine("a").down = HANGS
        await rig.at("a", QUARANTINED)
        rig.engine("a").down = None
        asked = list(rig.engine("a").calls)
        for version in (1, 2):
            await rig.publish(version)
            await rig.at("b", SERVING, version)
        assert rig.engine("a").calls == asked
        rig.register("a")  # its owner says that it is back
        await rig.at("a", SERVING, 2)


async def test_update_when_one_may_be_unavailable_then_the_next_is_woken_at_once(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path, max_unavailable=1, probe_interval_s=600.0) as rig:
        await rig.serving("a", "b", "c")
        await rig.publish(1)
        for name in ("a", "b", "c"):
            await rig.at(name, SERVING, 1)


async def test_announcement_when_it_could_not_be_said_then_it_is_said_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    said = asyncio.Event()

    async def say(_: Any, server_id: str) -> None:
        tries.append(server_id)
        if len(tries) == 1:
            raise Unavailable("nats: not connected")
        if server_id == "a":
            said.set()

    async with rig_of(tmp_path, probe_interval_s=600.0) as rig:
        await rig.serving("a")  # from here on nothing changes
        announcer = Announcer("nats://127.0.0.1:1", "test/announcer")
        monkeypatch.setattr(announcer, "_say", say)
        rig._keep(announcer.run(rig.coordinator), "announcer")
        await asyncio.wait_for(said.wait(), 20)
    assert tries == ["", "", "a"]


async def test_register_when_so_many_servers_are_known_then_a_client_adds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_weight_sync.coordinator.MOST_SERVERS", 2)
    async with rig_of(tmp_path) as rig:
        coordinator = rig.coordinator
        for name in ("a:1", "b:1"):
            coordinator.register(name, f"http://{name}")
        with pytest.raises(CapacityExceeded, match="2 servers are known, at most 2"):
            coordinator.register("c:1", "http://c:1")
        coordinator.register("a:1", "http://a:1")  # known already
        coordinator.register("d:1", "http://d:1", origin="dns")  # the run's own
        assert [each.server_id for each in coordinator.servers()] == ["a:1", "b:1", "d:1"]
