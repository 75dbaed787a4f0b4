"""What looks after a server, or follows a source of servers, never ends unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.areal_weight_sync.coordinator_rig import Rig, rig_of
from tests.waiting import until

from areal.weights.servers import ServerState
from areal_weight_sync.discovery.base import Discovery, StaticSource, listing_of
from areal_weight_sync.discovery.sources import make_sources
from areal_weight_sync.member import Member


async def test_member_when_its_loop_returns_then_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def returns(_: Member) -> None:
        return None

    async with rig_of(tmp_path) as rig:
        with monkeypatch.context() as patched:
            patched.setattr(Member, "run", returns)
            rig.register("a")
            await told(rig, "member-a returned: expected it to run until cancelled")
        rig.coordinator.drain("a", 0.0)
        rig.register("a")  # again before it was gone: its loop begins again
        await rig.publish_model()
        await rig.at("a", rig.server("a").state.SERVING, 0)


async def told(rig: Rig, text: str) -> None:
    await until(lambda: rig.ended, "what is told of the loop")
    assert [str(rig.ended.pop())] == [text]


def test_source_when_it_is_a_url_then_only_it_lists_once_and_nobody_is_told() -> None:
    url, name = make_sources(["http://10.0.0.7:30000", "dns://servers.example:30000"])
    assert isinstance(url, StaticSource)
    assert (url.lists_once, name.lists_once) == (True, False)


async def test_server_when_one_of_two_sources_still_lists_it_then_it_stays(tmp_path: Path) -> None:
    name, listing = "10.0.0.7:30000", listing_of(["http://10.0.0.7:30000"])
    async with rig_of(tmp_path) as rig:
        await rig.publish_model()
        discovery = Discovery(rig.coordinator, [])
        discovery.take("one", listing)
        discovery.take("two", listing)
        await rig.at(name, ServerState.SERVING, 0)
        discovery.take("one", {})
        assert rig.server(name).state is ServerState.SERVING
        discovery.take("two", {})
        await rig.until(lambda: rig.server(name) is None, "the drain")
