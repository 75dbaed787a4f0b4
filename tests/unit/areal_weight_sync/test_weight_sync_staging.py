"""Engines that read a version ahead of its use."""

from tests.unit.areal_weight_sync.coordinator_rig import QUARANTINED, SERVING, Rig, rig_of

from areal_weight_sync.engine.base import EngineError, Fault


async def serving(rig: Rig, *names: str) -> None:
    for name in names:
        rig.engine(name).stages = True
    await rig.serving(*names)
    for name in names:
        rig.engine(name).calls.clear()


def steps(rig: Rig, name: str) -> list[str]:
    wanted = ("stage", "pause", "load", "abort", "resume")
    return [call for call in rig.engine(name).calls if call.startswith(wanted)]


async def test_update_when_engine_stages_then_in_place_never_pauses(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        assert steps(rig, "a") == ["stage 1", "load 1"]
        assert rig.coordinator.status().update_seconds_mean == 0.0


async def test_update_when_retracting_then_staged_and_paused(tmp_path):
    async with rig_of(tmp_path, interrupt="retract") as rig:
        await serving(rig, "a")
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        assert steps(rig, "a") == ["stage 1", "pause", "load 1", "resume"]
        assert rig.coordinator.status().update_seconds_mean > 0.0


async def test_update_when_staged_weights_differ_from_the_others_then_never_swapped_in(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a", "b", "c")
        rig.engine("c").holds = "something else"
        rig.engine("c").stage_gate.clear()  # it comes last
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        await rig.at("b", SERVING, 1)
        rig.engine("c").stage_gate.set()
        await rig.at("c", QUARANTINED)
        assert "differ from those of 2 other servers" in rig.server("c").cause
        assert "load 1" not in steps(rig, "c")[: steps(rig, "c").index("stage 1") + 2]


async def test_update_when_staging_is_refused_then_quarantined_with_its_words(tmp_path):
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a")
        rig.engine("a").stage_error = EngineError(Fault.UPDATE_REFUSED, "tensor x is missing")
        rig.engine("a").load_error = rig.engine("a").stage_error
        await rig.publish(1)
        await rig.at("a", QUARANTINED)
        assert "tensor x is missing" in rig.server("a").cause
        rig.engine("a").stage_error = rig.engine("a").load_error = None
        await rig.at("a", SERVING, 1)


async def test_update_when_server_freezes_while_staging_then_probes_notice(tmp_path):
    async with rig_of(tmp_path, update_timeout_s=60.0) as rig:
        await serving(rig, "a")
        rig.engine("a").stage_gate.clear()
        await rig.publish(1)
        await rig.until(lambda: steps(rig, "a") == ["stage 1"], "staging")
        assert rig.server("a").state is SERVING  # it continues generating meanwhile
        rig.engine("a").down = EngineError(Fault.TIMEOUT, "/model_info: no answer within 2.0 s")
        await rig.at("a", QUARANTINED)
        assert "/model_info" in rig.server("a").cause
