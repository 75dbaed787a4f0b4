"""Servers that lie about their version or their weights, knowingly or not."""

from __future__ import annotations

from tests.unit.areal_weight_sync.coordinator_rig import QUARANTINED, SERVING, rig_of


async def test_liar_about_version_when_updated_then_is_quarantined_and_heals(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a", "b")
        rig.engine("b").reports = "7"
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        await rig.at("b", QUARANTINED)
        assert rig.server("b").cause == "reports weight_version '7', expected '0'"
        rig.engine("b").reports = None
        await rig.at("b", SERVING, 0)


async def test_liar_about_weights_when_first_to_answer_then_is_outvoted(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.engine("a").holds = "something else"
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)  # alone, it cannot be found out
        rig.register("b", "c")
        await rig.at("b", SERVING, 0)
        await rig.at("c", SERVING, 0)
        await rig.at("a", QUARANTINED)
        assert "differ" in rig.server("a").cause
        rig.engine("a").holds = None
        await rig.at("a", SERVING, 0)


async def test_stale_server_when_first_of_two_then_loses_the_tie(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a", "b")
        rig.engine("a").holds = "w0"  # says it has loaded version 1, and has not
        rig.engine("b").load_gate.clear()
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        rig.engine("b").load_gate.set()
        await rig.at("b", SERVING, 1)
        await rig.at("a", QUARANTINED)
        rig.engine("a").holds = None
        await rig.at("a", SERVING, 1)


async def test_engine_without_checksums_when_updated_then_logprobs_are_compared(tmp_path):
    async with rig_of(tmp_path) as rig:
        for name in "abc":
            rig.engine(name).has_checksums = False
        rig.engine("c").nats = -4.0
        await rig.serving("a", "b")
        rig.register("c")
        await rig.at("c", QUARANTINED)
        assert "differ by 3.000 nats" in rig.server("c").cause
        rig.engine("c").nats = -1.01
        await rig.at("c", SERVING, 0)
