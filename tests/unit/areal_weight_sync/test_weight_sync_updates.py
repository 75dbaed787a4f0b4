"""How servers come to a version: newcomers, updates, and others' failures meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.areal_weight_sync.coordinator_rig import (
    JOINING,
    QUARANTINED,
    SERVING,
    SYNCING,
    rig_of,
)

from areal.weights.servers import ServerState
from areal_weight_sync.engine.base import EngineError, Fault


async def test_newcomer_when_version_0_is_published_then_is_loaded_and_confirmed(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.until(lambda: "boot_id" in rig.engine("a").calls, "first contact")
        assert rig.server("a").state is JOINING
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        engine = rig.engine("a")
        # "default" may be anything: the weights are loaded although the path is the same.
        order = [c for c in engine.calls if c in ("pause", "load 0", "fingerprint", "resume")]
        assert order[:4] == ["pause", "load 0", "fingerprint", "resume"]
        assert not engine.paused
        assert engine.flushed is False


async def test_update_when_version_is_published_then_server_stays_listed_serving(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        seen: set[ServerState] = set()
        feed = rig.coordinator.open_feed()

        async def watch() -> None:
            while True:
                await feed.take()
                seen.add(rig.server("a").state)

        watcher = asyncio.create_task(watch())
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        watcher.cancel()
        assert seen == {SERVING}
        status = rig.coordinator.status()
        assert (status.confirmed_version, status.confirmed_servers, status.updates) == (1, 1, 1)
        assert status.aborted_requests == 0
        assert 0 < status.update_seconds_mean < 10


async def test_update_when_longer_than_the_grace_then_server_leaves_traffic(tmp_path):
    async with rig_of(tmp_path, serving_grace_s=0.03) as rig:
        await rig.serving("a")
        rig.engine("a").load_gate.clear()
        await rig.publish(1)
        await rig.at("a", SYNCING, 0)
        rig.engine("a").load_gate.set()
        await rig.at("a", SERVING, 1)


async def test_update_when_one_server_hangs_then_others_are_confirmed_meanwhile(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a", "b", "c")
        rig.engine("b").load_gate.clear()
        rig.engine("b").requests = 3
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        await rig.at("c", SERVING, 1)
        assert rig.server("b").version == 0
        await rig.at("b", QUARANTINED)
        assert "no answer within" in rig.server("b").cause
        assert rig.server("b").version == -1  # half loaded for all we know
        # Its requests were released (partial tokens), and it was not left paused.
        await rig.until(lambda: not rig.engine("b").paused, "the release of b")
        assert rig.engine("b").aborts == 3
        calls = rig.engine("b").calls
        # Before it continued: its weights are unknown.
        assert calls.index("abort_all") < calls.index("resume", calls.index("load 1"))
        rig.engine("b").load_gate.set()
        await rig.at("b", SERVING, 1)


async def test_update_when_one_may_be_unavailable_then_one_after_the_other(tmp_path):
    names = ("a", "b", "c")
    async with rig_of(tmp_path, max_unavailable=1, update_timeout_s=5.0) as rig:
        await rig.serving(*names)
        for name in names:
            rig.engine(name).load_gate.clear()
        await rig.publish(1)

        def loading() -> list[str]:
            return [name for name in names if "load 1" in rig.engine(name).calls]

        for number in (1, 2, 3):
            await rig.until(lambda number=number: len(loading()) == number, "the next one's turn")
            await asyncio.sleep(0.05)
            assert len(loading()) == number
            waiting = [name for name in names if name not in loading()]
            assert all(rig.server(name).state is SERVING for name in waiting)
            assert all(rig.server(name).version == 0 for name in waiting)
            for name in loading():
                rig.engine(name).load_gate.set()
        for name in names:
            await rig.at(name, SERVING, 1)


async def test_update_when_the_first_one_hangs_and_leaves_then_the_next_one_goes_on(tmp_path):
    async with rig_of(tmp_path, max_unavailable=1, update_timeout_s=30.0) as rig:
        await rig.serving("a", "b")
        for name in ("a", "b"):
            rig.engine(name).load_gate.clear()
        await rig.publish(1)
        await rig.until(
            lambda: any("load 1" in rig.engine(name).calls for name in ("a", "b")), "first"
        )
        first = "a" if "load 1" in rig.engine("a").calls else "b"
        other = "b" if first == "a" else "a"
        # One that waits for its turn is watched like any other.
        rig.engine(other).down = EngineError(Fault.UNREACHABLE, "cannot connect")
        await rig.at(other, QUARANTINED)
        rig.engine(other).down = None
        rig.engine(other).load_gate.set()
        rig.coordinator.drain(first, 0.0)
        await rig.at(other, SERVING, 1)


async def test_newcomer_when_one_may_be_unavailable_then_it_does_not_wait(tmp_path):
    async with rig_of(tmp_path, max_unavailable=1, update_timeout_s=30.0) as rig:
        await rig.serving("a")
        rig.engine("a").load_gate.clear()
        await rig.publish(1)
        await rig.until(lambda: "load 1" in rig.engine("a").calls, "the update")
        rig.register("new")
        await rig.at("new", SERVING, 1)
        rig.engine("a").load_gate.set()
        await rig.at("a", SERVING, 1)


async def test_newest_when_published_during_a_load_then_goes_straight_to_it(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        rig.engine("a").load_gate.clear()
        await rig.publish(1)
        await rig.until(lambda: "load 1" in rig.engine("a").calls, "load 1")
        await rig.publish(2)
        await rig.publish(3)
        rig.engine("a").load_gate.set()
        await rig.at("a", SERVING, 3)
        assert "load 2" not in rig.engine("a").calls


@pytest.mark.parametrize(
    ("mode", "flush"), [("in_place", False), ("retract", True), ("abort", True)]
)
async def test_interrupt_when_configured_then_mode_and_flush_follow(tmp_path, mode, flush):
    async with rig_of(tmp_path, interrupt=mode) as rig:
        await rig.serving("a")
        rig.engine("a").requests = 5
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        assert rig.engine("a").mode == mode
        assert rig.engine("a").flushed is flush
        aborted = 5 if mode == "abort" else 0
        assert rig.coordinator.status().aborted_requests == aborted
        assert rig.server("a").aborted_requests == aborted


async def test_load_when_refused_then_continue_is_sent_and_server_is_quarantined(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        rig.engine("a").load_error = EngineError(Fault.UPDATE_REFUSED, "tensor x is unknown")
        await rig.publish_model()
        await rig.at("a", QUARANTINED)
        assert rig.server("a").cause == "tensor x is unknown"
        await rig.until(lambda: not rig.engine("a").paused, "the release of a")
        rig.engine("a").load_error = None
        await rig.at("a", SERVING, 0)


async def test_continue_when_it_fails_then_the_next_try_continues_the_server(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        rig.engine("a").fail_resume = 1
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        assert not rig.engine("a").paused
        assert rig.engine("a").calls.count("load 0") == 2


async def test_update_when_one_answer_in_it_is_late_then_it_is_confirmed(tmp_path):
    async with rig_of(tmp_path, probe_interval_s=60.0, probe_timeout_s=0.2) as rig:
        await rig.serving("a")
        rig.engine("a").late = 1
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        assert rig.observer.failures == []


async def test_update_when_pause_is_not_answered_then_quarantined_before_it_is_released(tmp_path):
    """Its running requests go elsewhere at once, not after two more deadlines."""
    async with rig_of(tmp_path, probe_interval_s=60.0, backoff_s=60.0, backoff_max_s=60.0) as rig:
        await rig.serving("a")
        engine = rig.engine("a")
        seen = []

        async def frozen(*_) -> None:
            raise EngineError(Fault.TIMEOUT, "/pause_generation: no answer within 10.0 s")

        async def abort_all() -> None:
            seen.append(rig.server("a").state)

        engine.pause, engine.abort_all = frozen, abort_all
        await rig.publish(1)
        await rig.until(lambda: seen, "the release")
        assert seen == [QUARANTINED]
        assert "pause_generation" in rig.server("a").cause


async def test_stop_when_update_is_running_then_server_goes_on(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        rig.engine("a").load_gate.clear()
        await rig.publish_model()
        await rig.until(lambda: "load 0" in rig.engine("a").calls, "load 0")
        await rig.coordinator.stop()
        assert not rig.engine("a").paused
