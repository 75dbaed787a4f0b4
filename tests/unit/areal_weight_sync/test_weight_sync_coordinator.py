from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from tests.unit.areal_weight_sync.weight_sync_fakes import (
    FakeEngine,
    FakeStore,
    make_model,
    publish_folder,
)

from areal.errors import InvalidInput, NotFound, StaleIncarnation, WrongStep
from areal.servers import ServerState
from areal.weights import PolicyVersion
from areal_weight_sync.config import CoordinatorConfig
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.engine import EngineError, Fault
from areal_weight_sync.ports import Snapshot
from areal_weight_sync.server_state import ServerRecord

JOINING, SYNCING, SERVING = ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING
QUARANTINED = ServerState.QUARANTINED


class Failures:
    """An observer that remembers quarantines."""

    def __init__(self) -> None:
        self.failures: list[Fault] = []

    def updated(self, seconds: float) -> None:
        pass

    def failed(self, fault: Fault) -> None:
        self.failures.append(fault)


class Rig:
    """A coordinator over fake engines, named a, b, c…"""

    def __init__(self, tmp_path: Path, **config) -> None:
        self.root = tmp_path / "weights"
        self.root.mkdir()
        self.model = make_model(tmp_path / "model")
        self.engines: dict[str, FakeEngine] = {}
        self.tasks: list[asyncio.Task] = []
        values = {
            "probe_interval_s": 0.02,
            "backoff_s": 0.02,
            "backoff_max_s": 0.05,
            "update_timeout_s": 0.5,
            "serving_grace_s": 0.1,
            "deep_probe_every": 2,
        }
        self.store = FakeStore()
        self.observer = Failures()
        self.coordinator = Coordinator(
            CoordinatorConfig(**{**values, **config}),
            self.store,
            lambda url: self.engine(url.removeprefix("http://")),
            self._spawn,
            observer=self.observer,
            weights_root=self.root,
            keep_versions=2,
        )

    def _spawn(self, coroutine, name: str) -> asyncio.Task:
        task = asyncio.create_task(coroutine, name=name)
        self.tasks.append(task)
        return task

    def engine(self, name: str) -> FakeEngine:
        return self.engines.setdefault(name, FakeEngine())

    def register(self, *names: str) -> None:
        for name in names:
            self.coordinator.register(name, f"http://{name}")

    async def publish_model(self) -> None:
        await self.coordinator.publish(PolicyVersion(0, 0, str(self.model)))

    async def publish(self, version: int, incarnation: int = 1) -> int:
        return await self.coordinator.publish(publish_folder(self.root, version, incarnation))

    def server(self, name: str):
        record = self.coordinator.record(name)
        return None if record is None else record.public()

    async def until(self, condition, what: str, timeout: float = 5.0) -> None:
        feed = self.coordinator.open_feed()
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    await feed.take(0.01)
        except TimeoutError:
            states = self.coordinator.servers()
            raise AssertionError(f"waited {timeout} s for {what}: {states}") from None
        finally:
            self.coordinator.close_feed(feed)

    async def at(self, name: str, state: ServerState, version: int | None = None) -> None:
        await self.until(
            lambda: (
                self.server(name).state is state and version in (None, self.server(name).version)
            ),
            f"{name} {state} at {version}",
        )

    def failed_tasks(self) -> list[BaseException]:
        return [
            t.exception() for t in self.tasks if t.done() and not t.cancelled() and t.exception()
        ]


@asynccontextmanager
async def rig_of(tmp_path: Path, **config):
    rig = Rig(tmp_path, **config)
    try:
        yield rig
    finally:
        await rig.coordinator.stop()
        for task in rig.tasks:
            task.cancel()
        await asyncio.wait(rig.tasks, timeout=5) if rig.tasks else None
        assert rig.failed_tasks() == []


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
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
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
        assert 0 < status.update_seconds_mean < 0.1


async def test_update_when_longer_than_the_grace_then_server_leaves_traffic(tmp_path):
    async with rig_of(tmp_path, serving_grace_s=0.03) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").load_gate.clear()
        await rig.publish(1)
        await rig.at("a", SYNCING, 0)
        rig.engine("a").load_gate.set()
        await rig.at("a", SERVING, 1)


async def test_update_when_one_server_hangs_then_others_are_confirmed_meanwhile(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a", "b", "c")
        await rig.publish_model()
        for name in "abc":
            await rig.at(name, SERVING, 0)
        rig.engine("b").load_gate.clear()
        rig.engine("b").requests = 3
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        await rig.at("c", SERVING, 1)
        assert rig.server("b").version == 0
        await rig.at("b", QUARANTINED)
        assert "no answer within" in rig.server("b").cause
        assert rig.server("b").version == -1  # half loaded for all we know
        # Its requests were let go (partial tokens), and it was not left paused.
        await rig.until(lambda: not rig.engine("b").paused, "the release of b")
        assert rig.engine("b").aborts == 3
        rig.engine("b").load_gate.set()
        await rig.at("b", SERVING, 1)


async def test_update_when_one_may_be_unavailable_then_one_after_the_other(tmp_path):
    names = ("a", "b", "c")
    async with rig_of(tmp_path, max_unavailable=1, update_timeout_s=5.0) as rig:
        rig.register(*names)
        await rig.publish_model()
        for name in names:
            await rig.at(name, SERVING, 0)
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
        rig.register("a", "b")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        await rig.at("b", SERVING, 0)
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
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").load_gate.clear()
        await rig.publish(1)
        await rig.until(lambda: "load 1" in rig.engine("a").calls, "the update")
        rig.register("new")
        await rig.at("new", SERVING, 1)
        rig.engine("a").load_gate.set()
        await rig.at("a", SERVING, 1)


async def test_newest_when_published_during_a_load_then_goes_straight_to_it(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
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
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
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
        rig.register("a", "b")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        await rig.at("b", SERVING, 0)
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
        rig.register("a", "b")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        await rig.at("b", SERVING, 0)
        rig.register("c")
        await rig.at("c", QUARANTINED)
        assert "differ by 3.000 nats" in rig.server("c").cause
        rig.engine("c").nats = -1.01
        await rig.at("c", SERVING, 0)


async def test_probe_when_server_dies_then_quarantined_and_confirmed_without_reload(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
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
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        engine = rig.engine("a")
        before = engine.calls.count("load 0")
        engine.boot = "boot-2"  # restarted within a probe interval, saying the same version
        await rig.until(lambda: engine.calls.count("load 0") == before + 1, "second load")
        await rig.at("a", SERVING, 0)


async def test_probe_when_version_changed_then_server_is_loaded_anew(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        engine = rig.engine("a")
        engine.version, engine.weights = "default", "default"
        await rig.until(lambda: engine.calls.count("load 0") == 2, "second load")
        await rig.at("a", SERVING, 0)


async def test_report_when_server_is_dead_then_is_quarantined_before_the_next_probe(tmp_path):
    async with rig_of(tmp_path, probe_interval_s=60.0, backoff_s=60.0, backoff_max_s=60.0) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
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
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
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
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        engine, since = rig.engine("a"), rig.server("a").since
        engine.late = 2
        await rig.until(lambda: not engine.late, "both questions")
        engine.calls.clear()
        engine.late_answers.set()
        await rig.until(lambda: "weight_version" in engine.calls, "the next probe")
        assert (rig.server("a").state, rig.server("a").since) == (SERVING, since)


async def test_report_when_a_probe_waits_then_its_first_silence_is_enough(tmp_path):
    async with rig_of(tmp_path, probe_timeout_s=1.0, backoff_s=60.0, backoff_max_s=60.0) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        engine = rig.engine("a")
        engine.late = 100
        await rig.until(lambda: engine.late == 99, "a probe without an answer")
        rig.coordinator.report("a", "connection reset")
        await rig.at("a", QUARANTINED)
        assert engine.late == 99
        assert rig.server("a").cause == "/model_info: no answer within 1.0 s, and a request failed"


async def test_update_when_one_answer_in_it_is_late_then_it_is_confirmed(tmp_path):
    async with rig_of(tmp_path, probe_interval_s=60.0, probe_timeout_s=0.2) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").late = 1
        await rig.publish(1)
        await rig.at("a", SERVING, 1)
        assert rig.observer.failures == []


async def test_probe_when_two_in_a_row_are_missed_then_quarantined(tmp_path):
    async with rig_of(tmp_path, probe_timeout_s=0.2, backoff_s=60.0, backoff_max_s=60.0) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").late = 2
        await rig.at("a", QUARANTINED)
        assert rig.server("a").cause == "/model_info: no answer within 0.2 s, twice in a row"


async def test_report_when_one_probe_is_missed_then_quarantined(tmp_path):
    quiet = {"probe_interval_s": 60.0, "backoff_s": 60.0, "backoff_max_s": 60.0}
    async with rig_of(tmp_path, probe_timeout_s=0.2, **quiet) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").late = 1
        rig.coordinator.report("a", "connection reset")
        await rig.at("a", QUARANTINED)
        assert "and a request failed" in rig.server("a").cause


async def test_report_when_only_generation_fails_then_quarantined_until_it_generates(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
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
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        engine = rig.engine("a")
        engine.mute = EngineError(Fault.TIMEOUT, "/generate: no answer within 10.0 s")
        rig.coordinator.report("a", "a timeout")
        await rig.until(lambda: "logprobs" in engine.calls, "the probe of generation")
        await asyncio.sleep(0.05)
        assert rig.server("a").state is SERVING


async def test_version_when_superseded_while_it_is_verified_then_no_complaint(tmp_path):
    """A server that comes back finds the folder collected that it was about to load."""
    gate = threading.Event()
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        digests, verify = rig.coordinator.digests, rig.coordinator.digests.verify
        asked = []

        def slow(version: PolicyVersion) -> None:
            asked.append(version.version)
            if asked == [1, 1]:  # the first is for publishing, the second the member's
                gate.wait(5.0)
                raise InvalidInput("config.json: No such file or directory")
            verify(version)

        digests.verify = slow
        with structlog.testing.capture_logs() as logs:
            await rig.publish(1)
            await rig.until(lambda: asked.count(1) == 2, "verification by the member")
            await rig.publish(2)
            gate.set()
            await rig.at("a", SERVING, 2)
        assert "version_unusable" not in [line["event"] for line in logs]


async def test_dead_server_when_it_is_up_again_then_found_at_the_pace_of_probes(tmp_path):
    """It may be back any moment, and a refused connection costs nothing: no long backoff."""
    async with rig_of(tmp_path, backoff_s=60.0, backoff_max_s=60.0) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        engine = rig.engine("a")
        engine.down = EngineError(Fault.UNREACHABLE, "/model_info: cannot connect")
        await rig.at("a", QUARANTINED)
        engine.down, engine.boot, engine.version = None, "boot-2", "default"
        await rig.at("a", SERVING, 0)


async def test_update_when_pause_is_not_answered_then_quarantined_before_it_is_released(tmp_path):
    """Its running requests go elsewhere at once, not after two more deadlines."""
    async with rig_of(tmp_path, probe_interval_s=60.0, backoff_s=60.0, backoff_max_s=60.0) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
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


async def test_never_reached_server_when_refused_then_joining_not_quarantined(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.engine("a").down = EngineError(Fault.UNREACHABLE, "cannot connect")
        rig.register("a")
        await rig.publish_model()
        await rig.until(lambda: rig.server("a").cause != "", "a cause")
        assert rig.server("a").state is JOINING
        rig.engine("a").down = None
        await rig.at("a", SERVING, 0)


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
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").requests = 2
        rig.coordinator.drain("a", 0.05)
        await rig.until(lambda: rig.server("a") is None, "a forgotten")
        assert rig.engine("a").aborts == 2


async def test_drain_when_update_is_running_then_server_is_not_left_paused(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").load_gate.clear()
        await rig.publish(1)
        await rig.until(lambda: "load 1" in rig.engine("a").calls, "load 1")
        assert rig.engine("a").paused
        rig.coordinator.drain("a", 1.0)
        await rig.until(lambda: rig.server("a") is None, "a forgotten")
        assert not rig.engine("a").paused


async def test_drain_when_registered_again_then_joins(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        rig.engine("a").requests = 1
        rig.coordinator.drain("a", 10.0)
        rig.register("a")
        await rig.at("a", SERVING, 0)


async def test_publish_when_repeated_older_or_stale_then_idempotent_or_refused(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.publish_model()
        folder = publish_folder(rig.root, 2, 3)
        assert await rig.coordinator.publish(folder) == 2
        assert await rig.coordinator.publish(folder) == 2
        assert rig.coordinator.status().updates == 1
        with pytest.raises(WrongStep):
            await rig.publish(1, 3)
        with pytest.raises(StaleIncarnation):
            await rig.publish(3, 2)
        assert rig.coordinator.status().current_version == 2


async def test_publish_when_files_are_wrong_then_refused_and_no_server_is_touched(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        await rig.publish_model()
        await rig.at("a", SERVING, 0)
        torn = publish_folder(rig.root, 1)
        file = Path(torn.path) / "model.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        with pytest.raises(InvalidInput, match="digest"):
            await rig.coordinator.publish(torn)
        with pytest.raises(InvalidInput, match=r"norm.weight has shape \[5\], expected \[4\]"):
            await rig.coordinator.publish(
                publish_folder(
                    rig.root,
                    2,
                    shapes={"model.embed_tokens.weight": (16, 4), "model.norm.weight": (5,)},
                )
            )
        with pytest.raises(InvalidInput, match="absolute"):
            await rig.coordinator.publish(PolicyVersion(3, 1, "weights/v3"))
        assert rig.coordinator.status().current_version == 0
        assert not any(c in rig.engine("a").calls for c in ("load 1", "load 2", "load 3"))
        assert rig.server("a").state is SERVING


async def test_files_when_changed_after_publish_then_newcomer_waits_with_the_cause(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.publish_model()
        version = publish_folder(rig.root, 1)
        await rig.coordinator.publish(version)
        file = Path(version.path) / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-4])
        rig.register("a")
        await rig.until(lambda: "truncated" in rig.server("a").cause, "the cause")
        assert rig.server("a").state is JOINING
        assert "load 1" not in rig.engine("a").calls
        file.write_bytes(whole)
        await rig.at("a", SERVING, 1)


async def test_old_folders_when_all_servers_moved_on_then_deleted(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a", "b")
        await rig.publish_model()
        for version in (1, 2, 3):
            await rig.publish(version)
            await rig.at("a", SERVING, version)
            await rig.at("b", SERVING, version)
        await rig.until(
            lambda: (
                sorted(f.name for f in rig.root.iterdir())
                == [".spare", "v00000002-inc1", "v00000003-inc1"]
            ),
            "two folders and the spare",
        )
        assert rig.model.is_dir()


async def test_takeover_when_servers_are_at_the_version_then_confirmed_without_reload(tmp_path):
    async with rig_of(tmp_path) as rig:
        engine = rig.engine("a")
        engine.version, engine.weights, engine.boot = "0", "w0", "boot-9"
        engine.paused = True  # the coordinator before died in the middle
        from areal.weights import build_manifest

        base = build_manifest(rig.model, 0, 0)
        record = ServerRecord("a", "http://a", version=0, boot_id="boot-9")
        rig.coordinator.start(Snapshot(current=base, base=base, records=[record]))
        assert rig.server("a").state is JOINING
        await rig.at("a", SERVING, 0)
        assert "load 0" not in engine.calls
        assert not engine.paused


async def test_stop_when_update_is_running_then_server_goes_on(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a")
        rig.engine("a").load_gate.clear()
        await rig.publish_model()
        await rig.until(lambda: "load 0" in rig.engine("a").calls, "load 0")
        await rig.coordinator.stop()
        assert not rig.engine("a").paused
