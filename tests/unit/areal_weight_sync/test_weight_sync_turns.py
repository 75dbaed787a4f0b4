"""Servers sleep while a trainer computes on their GPUs, and wake whoever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.areal_weight_sync.coordinator_rig import (
    QUARANTINED,
    SERVING,
    SYNCING,
    Rig,
    rig_of,
)

from areal.errors import InvalidInput, StaleIncarnation
from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.interfaces import Snapshot
from areal_weight_sync.turns import ASLEEP, Turns

DEAD = EngineError(Fault.UNREACHABLE, "/model_info: cannot connect: Connection refused")


async def asleep(rig: Rig, *names: str) -> None:
    async with asyncio.timeout(60):
        while await rig.coordinator.hold(1, 60.0):
            pass
    for name in names:
        assert rig.engines[name].released
        assert rig.server(name).state is SYNCING
        assert rig.server(name).cause == "asleep while the trainer computes on its GPU"


async def test_turn_when_trainer_takes_and_releases_it_then_servers_sleep_and_load_the_newest(
    tmp_path: Path,
):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a", "b")
        rig.engines["a"].requests = 3
        await asleep(rig, "a", "b")
        assert rig.engines["a"].aborts == 3, "their callers keep the tokens, and continue later"
        await rig.publish(1)
        assert rig.engines["a"].released, "a version does not wake it"
        assert await rig.coordinator.hold(1, 0.0) == []
        for name in ("a", "b"):
            await rig.at(name, SERVING, 1)
            assert not rig.engines[name].paused
            assert rig.engines[name].weights == "w1"


async def test_turn_when_it_is_held_again_then_nothing_is_released_twice(tmp_path: Path):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        for _ in range(3):
            await asleep(rig, "a")
        assert rig.engines["a"].calls.count("sleep") == 1


async def test_turn_when_trainer_dies_in_it_then_servers_wake_when_the_lease_ends(tmp_path: Path):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        await asleep(rig, "a")
        assert await rig.coordinator.hold(1, 0.1) == [], "renewed for the last time"
        await rig.at("a", SERVING, 0)
        assert rig.engines["a"].weights == "w0", "loaded, not taken for what it had"


async def test_server_when_it_dies_asleep_then_quarantined_and_holds_no_memory(tmp_path: Path):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a", "b")
        await asleep(rig, "a", "b")
        rig.engines["a"].down = DEAD
        await rig.at("a", QUARANTINED)
        assert await rig.coordinator.hold(1, 30.0) == []
        rig.engines["a"].down = None
        rig.engines["a"].restart("boot-2", "default")
        await rig.until(lambda: rig.engines["a"].released, "a to sleep, too")
        await rig.coordinator.hold(1, 0.0)
        for name in ("a", "b"):
            await rig.at(name, SERVING, 0)


async def test_server_when_it_sleeps_long_then_no_probe_takes_it_for_hung(tmp_path: Path):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        await asleep(rig, "a")
        engine = rig.engines["a"]
        before, asked = len(engine.calls), engine.calls.count("weight_version")
        await rig.until(lambda: engine.calls.count("weight_version") > asked + 5, "probes")
        rig.coordinator.report("a", "a request failed there")
        await rig.until(lambda: engine.calls.count("weight_version") > asked + 10, "probes")
        assert rig.server("a").state is SYNCING
        assert not {"logprobs", "fingerprint", "load 0"} & set(engine.calls[before:])


async def test_weight_sync_when_it_dies_in_a_turn_then_the_next_waits_for_the_trainer(
    tmp_path: Path,
):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        await asleep(rig, "a")
        engine, now = rig.engines["a"], rig.coordinator
        record = now.record("a")
        assert record is not None
        await now.stop()
    (tmp_path / "next").mkdir()
    async with rig_of(tmp_path / "next", turns=True, turn_lease_s=60.0) as rig:
        rig.engines["a"] = engine
        state = Snapshot(now.target, now.base, [record])
        record.version = 0  # as written before it slept
        record.state = type(record)("a", "http://a").state
        engine.calls.clear()
        rig.coordinator.start(state)
        await rig.until(lambda: len(engine.calls) > 4, "probes")
        assert engine.released, "a trainer may be computing"
        await asleep(rig, "a")
        assert "sleep" not in engine.calls, "it slept already"
        await rig.coordinator.hold(1, 0.0)
        await rig.at("a", SERVING, 0)


async def test_weight_sync_when_trainer_is_dead_too_then_the_next_wakes_servers_after_a_lease(
    tmp_path: Path,
):
    async with rig_of(tmp_path, turns=True, turn_lease_s=0.3) as rig:
        engine = rig.engine("a")
        engine.version, engine.weights = f"{ASLEEP} after 0", "garbage"
        engine.released = engine.paused = True
        rig.coordinator.start(Snapshot())
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        assert engine.weights == "w0"


async def test_server_when_it_cannot_load_after_it_woke_then_it_never_continues(tmp_path: Path):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        await asleep(rig, "a")
        engine = rig.engines["a"]
        engine.load_error = EngineError(Fault.UPDATE_REFUSED, "/update_weights_from_disk: no")
        await rig.coordinator.hold(1, 0.0)
        await rig.at("a", QUARANTINED)
        assert engine.paused  # the fake's `resume` would fail the test, too
        engine.load_error = None
        await rig.at("a", SERVING, 0)
        assert engine.calls.count("wake") == 1, "SGLang ends itself when it resumes twice"


async def test_turn_when_it_begins_while_a_server_wakes_then_that_server_counts_as_awake(
    tmp_path: Path,
):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        await asleep(rig, "a")
        engine = rig.engines["a"]
        engine.wake_gate.clear()
        await rig.coordinator.hold(1, 0.0)
        await rig.until(lambda: "wake" in engine.calls, "the server to wake")
        assert await rig.coordinator.hold(1, 0.3) == ["a"], "its memory may be back already"
        engine.wake_gate.set()
        await asleep(rig, "a")


async def test_server_when_it_restarts_before_a_new_weight_sync_hears_of_a_turn_then_it_serves(
    tmp_path: Path,
):
    async with rig_of(tmp_path, turns=True, turn_lease_s=60.0) as rig:
        engine = rig.engine("a")
        engine.version, engine.weights = f"{ASLEEP} after 0", "garbage"
        engine.released = engine.paused = True
        rig.coordinator.start(Snapshot())
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SYNCING)
        states = {rig.server("a").state}
        asked = engine.calls.count("weight_version")
        await rig.until(
            lambda: (
                states.add(rig.server("a").state)
                or engine.calls.count("weight_version") > asked + 5
            ),
            "probes",
        )
        assert states == {SYNCING}, "it does not flap while it is left asleep"
        engine.restart("boot-2", "default")
        await rig.at("a", SERVING, 0)
        engine.down = EngineError(Fault.TIMEOUT, "/model_info: no answer")
        assert await rig.coordinator.hold(1, 0.3) == ["a"], "it is awake since its restart"


async def test_turn_when_a_server_joins_in_it_then_it_sleeps_and_later_serves_the_newest(
    tmp_path: Path,
):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        await asleep(rig, "a")
        await rig.publish(1)
        rig.register("b")
        await rig.until(lambda: rig.engine("b").released, "b to sleep, too")
        assert "load 1" not in rig.engines["b"].calls
        assert await rig.coordinator.hold(1, 30.0) == []
        await rig.coordinator.hold(1, 0.0)
        for name in ("a", "b"):
            await rig.at(name, SERVING, 1)


async def test_server_when_it_leaves_asleep_then_it_is_forgotten_and_the_turn_lasts(
    tmp_path: Path,
):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a", "b")
        await asleep(rig, "a", "b")
        rig.coordinator.drain("a", 0.2)
        await rig.until(lambda: rig.coordinator.record("a") is None, "a to be forgotten")
        assert await rig.coordinator.hold(1, 30.0) == []
        assert "resume" not in rig.engines["a"].calls[-3:]


async def test_requests_when_servers_sleep_then_their_aborts_are_counted(tmp_path: Path):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        rig.engines["a"].requests = 3
        await asleep(rig, "a")
        assert rig.coordinator.status().aborted_requests == 3
        assert rig.server("a").aborted_requests == 3


async def test_turn_when_a_server_does_not_sleep_then_it_is_named(tmp_path: Path):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a", "b")
        rig.engines["b"].down = EngineError(Fault.TIMEOUT, "/pause_generation: no answer")
        await rig.at("b", QUARANTINED)
        held: list[str] = []

        async def hold() -> None:
            held.extend(await rig.coordinator.hold(1, 3.0))

        await asyncio.gather(hold(), rig.until(lambda: rig.engines["a"].released, "a to sleep"))
        assert held[-1] == "b", "it may hold memory, and so the trainer does not begin"


async def test_turn_when_it_is_of_an_older_trainer_or_no_gpu_is_shared_then_refused(
    tmp_path: Path,
):
    async with rig_of(tmp_path, turns=True) as rig:
        await rig.serving("a")
        await rig.coordinator.hold(2, 0.0)
        with pytest.raises(StaleIncarnation, match="another trainer has the GPUs"):
            await rig.coordinator.hold(1, 10.0)
        for lease_s in (600.0, -1.0):
            with pytest.raises(InvalidInput, match="expected 0 to 60 s"):
                await rig.coordinator.hold(2, lease_s)
        for incarnation in (0, -1):
            with pytest.raises(InvalidInput, match=f"incarnation {incarnation}: expected 1 or"):
                await rig.coordinator.hold(incarnation, 10.0)
        assert not rig.engines["a"].released
    (tmp_path / "apart").mkdir()
    async with rig_of(tmp_path / "apart") as rig:
        with pytest.raises(InvalidInput, match="alternating"):
            await rig.coordinator.hold(1, 10.0)


def test_turns_when_no_one_has_asked_yet_then_sleeping_servers_wait_and_awake_ones_serve():
    turns = Turns(now=100.0, lease_s=15.0)
    assert not turns.trainers(101.0)
    assert not turns.may_wake(114.0)
    assert turns.may_wake(115.0)
    turns.hold(3, until=120.0)
    assert turns.trainers(119.0)
    assert turns.may_wake(120.0)
