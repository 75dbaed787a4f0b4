"""Servers that die or freeze while a trainer broadcasts to them: it never waits for long."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from tests.integration.broadcast_rig import SERVING, World, running_world

from areal.weights.servers import ServerState
from areal_torch.publish import distributed

pytestmark = pytest.mark.timeout(300)


async def test_member_when_killed_in_the_middle_then_the_version_falls_back_and_a_group_is_rebuilt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_world(tmp_path) as world:
        await killed(world, capsys)


async def killed(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, (victim, _) = world.trainer, world.servers[1]
    await trainer.publish(1)
    await world.at(1)
    victim.send_signal(signal.SIGSTOP)  # the broadcast will wait for it

    async def kill() -> None:
        await asyncio.sleep(0.7)
        victim.kill()

    killing = asyncio.create_task(kill())
    blocked = await trainer.publish(2)
    await killing
    assert 0.5 < blocked < distributed.JOIN_S
    assert "transport_fell_back" in capsys.readouterr().out
    await world.rig.until(world.servers[0][1], SERVING, 2)
    assert trainer.offers[1].group == trainer.offers[0].group
    await trainer.publish(3)  # without it
    assert trainer.offers[-1].world_size == 2
    victim.start()
    await world.at(3)
    await trainer.publish(4)
    await world.at(4)
    assert trainer.offers[-1].world_size == 3
    assert "transport_fell_back" not in capsys.readouterr().out


async def test_member_when_it_accepts_and_never_joins_then_the_trainer_goes_on_by_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "JOIN_S", 2.0)
    async with running_world(tmp_path) as world:
        await stuck(world, capsys)


async def stuck(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, (frozen, url) = world.trainer, world.servers[1]
    frozen.send_signal(signal.SIGSTOP)
    try:
        blocked = await trainer.publish(1)
        assert blocked < 10
        assert "waited" in capsys.readouterr().out
        await world.rig.until(world.servers[0][1], SERVING, 1)
        server = await world.rig.until(url, ServerState.QUARANTINED)
        assert server is not None
        assert "no answer" in server.cause
    finally:
        frozen.send_signal(signal.SIGCONT)
    await world.at(1)
    await trainer.publish(2)
    await world.at(2)
