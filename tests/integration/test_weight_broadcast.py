"""`distributed` as users run it: real services and engines, and this process is the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import torch
from tests.integration.broadcast_rig import World, running_world
from tests.integration.weight_sync_rig import generate

from areal.errors import InvalidInput


async def refused_when_misshapen(world: World) -> None:
    name = "model.norm.weight"
    with pytest.raises(InvalidInput, match=name):
        await world.trainer.publish(1, **{name: torch.zeros(7)})
    assert (await world.rig.client.status()).current_version == 0
    assert "group" not in world.servers[0][0].log


@pytest.mark.timeout(300)
async def test_broadcast_when_servers_come_and_versions_follow_each_other_then_all_have_the_bits(
    tmp_path: Path,
) -> None:
    async with running_world(tmp_path) as world:
        await refused_when_misshapen(world)
        await followed(world)


async def followed(world: World) -> None:
    trainer = world.trainer
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(generate(session, world.servers[0][1], 400, 0))
        for version in (1, 2, 3):  # at once: no one waits for a server in between
            await trainer.publish(version)
        await world.at(3)
        spans = (await running)["meta_info"]["weight_versions"]
    assert spans[0]["version"] == "0"
    assert spans[-1]["end"] == 400
    assert [seats.world_size for seats in trainer.offers] == [3, 3, 3]
    assert len({seats.group for seats in trainer.offers}) == 1
    for process, _ in world.servers:
        assert "v00000003-inc1" not in process.log  # no one read the folder
    await world.add()
    await world.at(3)  # the newcomer did
    await trainer.publish(4)
    await world.at(4)
    assert trainer.offers[-1].world_size == 4
    assert trainer.offers[-1].group != trainer.offers[0].group
    assert "broadcast_missed" not in world.rig.process.log
    status = await world.rig.client.status()
    assert (status.aborted_requests, status.unstored) == (0, False)
