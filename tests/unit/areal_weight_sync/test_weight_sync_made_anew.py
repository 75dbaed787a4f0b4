"""A number that comes to mean other weights: its trainer died before they were stored."""

from dataclasses import replace

from tests.unit.areal_weight_sync.coordinator_rig import Rig, rig_of
from tests.unit.areal_weight_sync.test_weight_sync_broadcast import offer, unstored
from tests.unit.areal_weight_sync.test_weight_sync_staging import serving
from tests.unit.areal_weight_sync.weight_sync_fakes import publish_folder

from areal.weights.manifest import PolicyVersion
from areal.weights.servers import ServerState
from areal_weight_sync.interfaces import Snapshot
from areal_weight_sync.server_state import ServerRecord

SERVING, JOINING = ServerState.SERVING, ServerState.JOINING


def made_anew(rig: Rig, version: int) -> PolicyVersion:
    """What the next trainer publishes: not bit for bit what the first one had."""
    again = publish_folder(rig.root, version, 2)
    return replace(again, tensors=tuple(replace(t, digest="other") for t in again.tensors))


async def abandoned(rig: Rig, *names: str) -> PolicyVersion:
    """Servers that hold version 1 of a trainer that has died."""
    await serving(rig, *names)
    version, _ = unstored(rig, 1)
    await offer(rig, version)
    for name in names:
        await rig.at(name, SERVING, 1)
        rig.engine(name).calls.clear()
    return version


async def test_servers_when_their_version_is_made_anew_then_out_of_traffic_before_the_answer(
    tmp_path,
):
    async with rig_of(tmp_path) as rig:
        await abandoned(rig, "a", "b")
        await rig.coordinator.publish(made_anew(rig, 1))
        status = rig.coordinator.status()
        assert (status.confirmed_servers, status.confirmed_version) == (0, 0)
        for name in ("a", "b"):
            assert rig.server(name).state is JOINING
            assert "created again" in rig.server(name).cause
        for name in ("a", "b"):
            await rig.at(name, SERVING, 1)
            assert rig.engine(name).calls.count("load 1") == 1
        assert rig.coordinator.status().confirmed_version == 1
        assert not rig.observer.failures  # they have done nothing wrong


async def test_reload_when_the_number_stays_then_nothing_of_the_other_weights_goes_on(tmp_path):
    """Requests end with their tokens, and no cached prefix is found under the same number."""
    async with rig_of(tmp_path) as rig:
        await abandoned(rig, "a")
        await rig.coordinator.publish(made_anew(rig, 1))
        await rig.at("a", SERVING, 1)
        engine = rig.engine("a")
        assert (engine.mode, engine.flushed) == ("abort", True)
        await rig.publish(2, incarnation=2)
        await rig.at("a", SERVING, 2)
        assert not engine.flushed


async def test_server_when_it_finishes_loading_what_was_abandoned_then_does_not_serve_it(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        engine = rig.engine("a")
        engine.load_gate.clear()
        await offer(rig, unstored(rig, 1)[0])
        await rig.until(lambda: "load 1" in engine.calls, "a loads what will be abandoned")
        await rig.coordinator.publish(made_anew(rig, 1))
        engine.load_gate.set()
        await rig.at("a", SERVING, 1)
        assert engine.calls.count("load 1") == 2


async def test_server_when_the_same_bits_are_made_anew_then_serves_on(tmp_path):
    async with rig_of(tmp_path) as rig:
        await abandoned(rig, "a")
        await rig.coordinator.publish(publish_folder(rig.root, 1, 2))
        await rig.until(lambda: "weight_version" in rig.engine("a").calls, "a is probed")
        assert rig.server("a").state is SERVING
        assert "load 1" not in rig.engine("a").calls


async def test_coordinator_when_killed_while_a_version_is_made_anew_then_the_next_one_reloads(
    tmp_path,
):
    """All servers agree about the abandoned weights: their checksums alone would confirm them."""
    async with rig_of(tmp_path) as rig:
        await rig.publish_model()
        base, version = rig.coordinator.base, made_anew(rig, 1)
        before, _ = unstored(rig, 1)
        records = []
        for name in ("a", "b"):
            engine = rig.engine(name)
            engine.version, engine.weights = "1", "abandoned"
            record = ServerRecord(name, f"http://{name}", boot_id=engine.boot)
            record.hold(before)
            records.append(ServerRecord.from_json(record.to_json()))
        rig.coordinator.start(Snapshot(current=version, base=base, records=records))
        for name in ("a", "b"):
            await rig.at(name, SERVING, 1)
            assert rig.engine(name).weights == "w1"
