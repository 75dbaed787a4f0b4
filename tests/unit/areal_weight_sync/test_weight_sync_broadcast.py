"""Versions that a trainer broadcasts before they are stored."""

from dataclasses import replace

import pytest
from tests.unit.areal_weight_sync.coordinator_rig import Rig, rig_of
from tests.unit.areal_weight_sync.test_weight_sync_staging import serving
from tests.unit.areal_weight_sync.weight_sync_fakes import publish_folder

from areal.errors import InvalidInput
from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion, WeightTensor
from areal.weights.servers import ServerState
from areal_weight_sync.engine.base import EngineError, Fault

SERVING, QUARANTINED = ServerState.SERVING, ServerState.QUARANTINED
JOINING = ServerState.JOINING
REFUSED = EngineError(Fault.UPDATE_REFUSED, "group gone")


def unstored(rig: Rig, version: int, incarnation: int = 1) -> tuple[PolicyVersion, PolicyVersion]:
    """What is offered, and what is published once it is stored."""
    stored = publish_folder(rig.root, version, incarnation)
    return replace(stored, files=()), stored


async def offer(rig: Rig, version: PolicyVersion, group: str = "") -> Seats:
    return await rig.coordinator.offer(version, Offer("127.0.0.1", 7000, "gloo", group))


async def test_offer_when_servers_serve_then_each_receives_without_a_pause(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a", "b")
        rig.engine("b").ranks = 2
        version, stored = unstored(rig, 1)
        seats = await offer(rig, version)
        assert seats.world_size == 4
        for name in ("a", "b"):
            await rig.at(name, SERVING, 1)
            assert "pause" not in rig.engine(name).calls
            assert rig.engine(name).calls.count("receive 1") == 1
        taken = [rig.engine(name).received[0] for name in ("a", "b")]
        assert {seat.group for seat in taken} == {seats.group}
        assert [seat.rank for seat in taken] == [1, 2]
        assert rig.coordinator.status().unstored
        assert await rig.coordinator.publish(stored) == 1
        assert not rig.coordinator.status().unstored
        assert rig.coordinator.totals.published == 1
        assert "stage 1" not in rig.engine("a").calls


async def test_group_when_membership_changes_then_is_made_anew_else_kept(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        groups = []
        for number, held in ((1, ""), (2, "kept"), (3, "kept"), (4, "")):
            version, stored = unstored(rig, number)
            seats = await offer(rig, version, groups[-1] if held else "")
            groups.append(seats.group)
            await rig.at("a", SERVING, number)
            await rig.coordinator.publish(stored)
            if number == 2:
                rig.engine("b").stages = True
                rig.register("b")
                await rig.at("b", SERVING, 2)
                assert "receive 2" not in rig.engine("b").calls  # a newcomer reads what is stored
        assert groups[0] == groups[1]
        assert len(set(groups)) == 3
        assert seats.world_size == 3
        rig.engine("a").boot = "boot-2"
        await rig.until(lambda: rig.engine("a").calls.count("load 4") == 2, "a loaded again")
        await rig.at("a", SERVING, 4)
        assert (await offer(rig, unstored(rig, 5)[0], groups[-1])).group != groups[-1]


async def test_newcomer_when_the_version_is_not_stored_yet_then_waits_out_of_traffic(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        version, stored = unstored(rig, 1)
        await offer(rig, version)
        await rig.at("a", SERVING, 1)
        rig.register("b")
        await rig.until(lambda: "not stored yet" in rig.server("b").cause, "b says why")
        assert rig.server("b").state is JOINING
        await rig.coordinator.publish(stored)
        await rig.at("b", SERVING, 1)


async def test_server_when_the_broadcast_misses_it_then_serves_on_and_reads_the_files(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a", "b")
        rig.engine("b").receive_error = REFUSED
        version, stored = unstored(rig, 1)
        await offer(rig, version)
        await rig.at("a", SERVING, 1)
        await rig.until(lambda: "stored" in rig.server("b").cause, "b says why")
        assert (rig.server("b").state, rig.server("b").version) == (SERVING, 0)
        assert rig.engine("b").calls.count("receive 1") == 1
        assert not rig.observer.failures
        await rig.coordinator.publish(stored)
        await rig.at("b", SERVING, 1)
        assert "stage 1" in rig.engine("b").calls


async def test_server_when_it_never_joins_then_quarantined_and_the_others_go_on(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a", "b")
        rig.engine("b").receive_error = EngineError(Fault.TIMEOUT, "/init: no answer")
        version, stored = unstored(rig, 1)
        await offer(rig, version)
        await rig.at("a", SERVING, 1)
        await rig.until(lambda: Fault.TIMEOUT in rig.observer.failures, "b is quarantined")
        await rig.coordinator.publish(stored)
        await rig.at("b", SERVING, 1)


async def test_server_that_cannot_stage_when_loading_fails_then_quarantined_until_stored(tmp_path):
    """An SGLang whose broadcast broke holds parts of two versions."""
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        rig.engine("a").stages = False
        rig.engine("a").load_error = REFUSED
        version, stored = unstored(rig, 1)
        await offer(rig, version)
        await rig.until(lambda: Fault.UPDATE_REFUSED in rig.observer.failures, "a fails")
        rig.engine("a").load_error = None
        await rig.until(lambda: "not stored yet" in rig.server("a").cause, "a waits")
        assert rig.server("a").state is not SERVING
        await rig.coordinator.publish(stored)
        await rig.at("a", SERVING, 1)


async def test_offer_when_nobody_can_receive_then_nothing_changes(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.publish_model()
        assert (await offer(rig, unstored(rig, 1)[0])).world_size == 0
        rig.engine("a").ranks = 0  # data-parallel copies
        rig.register("a")
        await rig.at("a", SERVING, 0)
        version, stored = unstored(rig, 2)
        assert (await offer(rig, version)).world_size == 0
        assert rig.coordinator.status().current_version == 0
        assert await rig.coordinator.publish(stored) == 2
        await rig.at("a", SERVING, 2)


async def test_offer_when_tensors_are_wrong_then_refused_and_no_server_is_asked(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        good, _ = unstored(rig, 1)
        for tensors, message in (
            ((*good.tensors, WeightTensor("extra", (2,), "F32")), "extra is unknown"),
            (good.tensors[1:], "is missing"),
            ((replace(good.tensors[0], shape=(3,)), *good.tensors[1:]), r"shape \[3\]"),
            ((replace(good.tensors[0], dtype="I8"), *good.tensors[1:]), "dtype I8"),
        ):
            with pytest.raises(InvalidInput, match=message):
                await offer(rig, replace(good, tensors=tensors))
        assert rig.coordinator.status().current_version == 0
        assert not any(call.startswith("receive") for call in rig.engine("a").calls)


async def test_unstored_version_when_its_trainer_died_then_the_next_one_makes_it_anew(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        await offer(rig, unstored(rig, 1)[0])
        await rig.at("a", SERVING, 1)
        rig.register("b")
        again = publish_folder(rig.root, 1, 2)
        again = replace(
            again, tensors=tuple(replace(t, digest="other") for t in again.tensors)
        )  # not bit for bit what the first one had
        rig.engine("a").calls.clear()
        assert await rig.coordinator.publish(again) == 1
        await rig.until(lambda: "load 1" in rig.engine("a").calls, "a loads the new one")
        for name in ("a", "b"):
            await rig.at(name, SERVING, 1)


async def test_server_when_late_then_takes_its_seat_though_the_version_is_stored_by_now(tmp_path):
    """The others are in the broadcast already, and cannot continue without it."""
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        rig.engine("a").load_gate.clear()  # busy with version 1
        await rig.publish(1)
        await rig.until(lambda: "load 1" in rig.engine("a").calls, "a loads 1")
        version, stored = unstored(rig, 2)
        assert (await offer(rig, version)).world_size == 2
        await rig.coordinator.publish(stored)
        rig.engine("a").load_gate.set()
        await rig.at("a", SERVING, 2)
        assert "receive 2" in rig.engine("a").calls
