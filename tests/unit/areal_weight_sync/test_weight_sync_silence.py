"""Servers that die, hang or answer late: when they are quarantined, and when they serve again."""

from __future__ import annotations

import asyncio

from tests.unit.areal_weight_sync.coordinator_rig import JOINING, QUARANTINED, SERVING, rig_of

from areal_weight_sync.engine.base import EngineError, Fault


async def test_probe_when_server_dies_then_quarantined_and_confirmed_without_reload(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        loads = engine.calls.count("load 0")
        engine.down = EngineError(Fault.UNREACHABLE, "/model_info: cannot connect: refused")
        await rig.at("a", QUARANTINED)
        assert "cannot connect" in rig.server("a").cause
        engine.down = None
        await rig.at("a", SERVING, 0)
        assert engine.calls.count("load 0") == loads  # same boot: checksum is enough


async def test_probe_when_boot_changed_then_server_is_loaded_anew(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        before = engine.calls.count("load 0")
        engine.boot = "boot-2"  # restarted within a probe interval, saying the same version
        await rig.until(lambda: engine.calls.count("load 0") == before + 1, "second load")
        await rig.at("a", SERVING, 0)


async def test_probe_when_restarted_by_hand_as_the_same_version_then_noticed_at_once(tmp_path):
    async with rig_of(tmp_path, deep_probe_every=10**9) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        await rig.until(lambda: engine.calls[-3:] == ["weight_version"] * 3, "three probes", 10)
        engine.restart("boot-2", engine.version)
        await rig.until(lambda: engine.calls.count("load 0") == 2, "second load", 10)
        await rig.at("a", SERVING, 0)
        assert engine.weights == "w0"


async def test_probe_when_the_connection_stayed_open_then_the_boot_is_not_asked(tmp_path):
    async with rig_of(tmp_path, deep_probe_every=10**9) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        await rig.until(lambda: engine.calls[-3:] == ["weight_version"] * 3, "three probes", 10)
        engine.connections += 1
        asked = engine.calls.count("boot_id")
        await rig.until(lambda: engine.calls.count("boot_id") > asked, "the boot", 10)
        await rig.until(lambda: engine.calls[-3:] == ["weight_version"] * 3, "three probes", 10)
        assert engine.calls.count("boot_id") == asked + 1
        assert engine.calls.count("load 0") == 1


async def test_probe_when_version_changed_then_server_is_loaded_anew(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        engine.version, engine.weights = "default", "default"
        await rig.until(lambda: engine.calls.count("load 0") == 2, "second load")
        await rig.at("a", SERVING, 0)


async def test_report_when_server_is_dead_then_is_quarantined_before_the_next_probe(tmp_path):
    async with rig_of(tmp_path, probe_interval_s=60.0, backoff_s=60.0, backoff_max_s=60.0) as rig:
        await rig.serving("a")
        rig.engine("a").down = EngineError(Fault.TIMEOUT, "/model_info: no answer within 2.0 s")
        rig.coordinator.report("a", "connection reset")
        await rig.at("a", QUARANTINED)
        # Neither a report nor a new version cuts the backoff short; its owner does.
        rig.engine("a").down = None
        rig.coordinator.report("a", "again")
        await rig.publish(1)
        await asyncio.sleep(0.05)
        assert rig.server("a").state is QUARANTINED
        rig.register("a")
        await rig.at("a", SERVING, 1)


async def test_probe_when_answered_late_once_then_the_server_serves_on(tmp_path):
    """Real SGLang on a busy processor takes seconds at times, and generates all the while."""
    async with rig_of(tmp_path, probe_timeout_s=0.2) as rig:
        await rig.serving("a")
        engine, since = rig.engine("a"), rig.server("a").since
        for _ in range(3):
            engine.late = 1
            engine.calls.clear()
            await rig.until(lambda: not engine.late and len(engine.calls) > 4, "probes")
        assert (rig.server("a").state, rig.server("a").since) == (SERVING, since)
        await rig.publish(1)
        await rig.at("a", SERVING, 1)


async def test_probe_when_every_answer_is_late_but_comes_then_the_server_serves_on(tmp_path):
    async with rig_of(tmp_path, probe_timeout_s=1.0) as rig:
        await rig.serving("a")
        engine, since = rig.engine("a"), rig.server("a").since
        engine.late = 2
        await rig.until(lambda: not engine.late, "both questions")
        engine.calls.clear()
        engine.late_answers.set()
        await rig.until(lambda: "weight_version" in engine.calls, "the next probe")
        assert (rig.server("a").state, rig.server("a").since) == (SERVING, since)


async def test_report_when_a_probe_waits_then_its_first_silence_is_enough(tmp_path):
    async with rig_of(tmp_path, probe_timeout_s=1.0, backoff_s=60.0, backoff_max_s=60.0) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        engine.late = 100
        await rig.until(lambda: engine.late == 99, "a probe without an answer")
        rig.coordinator.report("a", "connection reset")
        await rig.at("a", QUARANTINED)
        assert engine.late == 99
        assert rig.server("a").cause == "/model_info: no answer within 1.0 s, and a request failed"


async def test_probe_when_two_in_a_row_are_missed_then_quarantined(tmp_path):
    async with rig_of(tmp_path, probe_timeout_s=0.2, backoff_s=60.0, backoff_max_s=60.0) as rig:
        await rig.serving("a")
        rig.engine("a").late = 2
        await rig.at("a", QUARANTINED)
        assert rig.server("a").cause == "/model_info: no answer within 0.2 s, twice in a row"


async def test_report_when_one_probe_is_missed_then_quarantined(tmp_path):
    quiet = {"probe_interval_s": 60.0, "backoff_s": 60.0, "backoff_max_s": 60.0}
    async with rig_of(tmp_path, probe_timeout_s=0.2, **quiet) as rig:
        await rig.serving("a")
        rig.engine("a").late = 1
        rig.coordinator.report("a", "connection reset")
        await rig.at("a", QUARANTINED)
        assert "and a request failed" in rig.server("a").cause


async def test_report_when_only_generation_fails_then_quarantined_until_it_generates(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        engine.mute = EngineError(Fault.HTTP_STATUS, "/generate: HTTP 500: CUDA error")
        rig.coordinator.report("a", "HTTP 500: CUDA error")
        await rig.at("a", QUARANTINED)
        asked = engine.calls.count("logprobs")
        await rig.until(lambda: engine.calls.count("logprobs") > asked + 2, "tries again")
        assert rig.server("a").state is not SERVING
        assert "CUDA error" in rig.server("a").cause
        engine.mute = None
        await rig.at("a", SERVING, 0)


async def test_report_when_generation_is_only_late_then_the_server_serves_on(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        engine.mute = EngineError(Fault.TIMEOUT, "/generate: no answer within 10.0 s")
        rig.coordinator.report("a", "a timeout")
        await rig.until(lambda: "logprobs" in engine.calls, "the probe of generation")
        await asyncio.sleep(0.05)
        assert rig.server("a").state is SERVING


async def test_dead_server_when_it_is_up_again_then_found_at_the_pace_of_probes(tmp_path):
    """It may be back any moment, and a refused connection costs nothing: no long backoff."""
    async with rig_of(tmp_path, backoff_s=60.0, backoff_max_s=60.0) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        engine.down = EngineError(Fault.UNREACHABLE, "/model_info: cannot connect")
        await rig.at("a", QUARANTINED)
        engine.down, engine.boot, engine.version = None, "boot-2", "default"
        await rig.at("a", SERVING, 0)


async def test_never_reached_server_when_refused_then_joining_not_quarantined(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.engine("a").down = EngineError(Fault.UNREACHABLE, "cannot connect")
        rig.register("a")
        await rig.publish_model()
        await rig.until(lambda: rig.server("a").cause != "", "a cause")
        assert rig.server("a").state is JOINING
        rig.engine("a").down = None
        await rig.at("a", SERVING, 0)
