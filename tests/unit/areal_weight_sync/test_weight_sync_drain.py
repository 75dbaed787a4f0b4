"""Servers that leave."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.areal_weight_sync.coordinator_rig import SERVING, rig_of

from areal.errors import NotFound
from areal.weights.servers import ServerState


async def test_drain_when_requests_run_then_waits_then_forgets(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a", "b")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").requests = 2
        rig.coordinator.drain("a", 10.0)
        assert rig.server("a").state is ServerState.DRAINING
        assert rig.coordinator.status().servers == 1
        assert rig.coordinator.status().draining == 1
        await asyncio.sleep(0.05)
        assert rig.server("a") is not None
        rig.engine("a").requests = 0
        await rig.until(lambda: rig.server("a") is None, "a forgotten")
        assert rig.coordinator.status().draining == 0, "watchers see that it has gone"
        assert rig.engine("a").aborts == 0
        with pytest.raises(NotFound, match="'a'"):
            rig.coordinator.drain("a", 1.0)


async def test_drain_when_deadline_passes_then_requests_are_aborted(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        rig.engine("a").requests = 2
        rig.coordinator.drain("a", 0.05)
        await rig.until(lambda: rig.server("a") is None, "a forgotten")
        assert rig.engine("a").aborts == 2


async def test_drain_when_update_is_running_then_server_is_not_left_paused(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        rig.engine("a").load_gate.clear()
        await rig.publish(1)
        await rig.until(lambda: "load 1" in rig.engine("a").calls, "load 1")
        assert rig.engine("a").paused
        rig.coordinator.drain("a", 1.0)
        await rig.until(lambda: rig.server("a") is None, "a forgotten")
        assert not rig.engine("a").paused


async def test_drain_when_registered_again_then_joins(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        rig.engine("a").requests = 1
        rig.coordinator.drain("a", 10.0)
        rig.register("a")
        await rig.at("a", SERVING, 0)
