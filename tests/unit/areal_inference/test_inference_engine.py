"""The engine's thread around a scheduler: commands, deadlines, failures. No torch model here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from areal_inference.decode.engine import Engine, EngineError
from areal_inference.decode.request import Request, SamplingParams
from areal_inference.decode.scheduler import Scheduler


class SlowRunner:
    """Every token is 7; a step waits for a permit, so a test decides how far generation gets."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.broken = False

    def fits(self, rows: int, length: int) -> bool:
        return True

    def reserve(self, rows: int, length: int) -> None:
        pass

    def prefill(self, requests: Sequence[Request]) -> None:
        pass

    def share(self, source: int, targets: list[int], length: int) -> None:
        pass

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        pass

    def clear(self, row: int) -> None:
        pass

    def decode(self, requests: Sequence[Request], *, changed: bool):
        assert self.permits.acquire(timeout=10)
        if self.broken:
            raise MemoryError("no room")
        return [7] * len(requests), [-1.0] * len(requests)

    def load(self, weights: object) -> None:
        pass

    def reset(self) -> None:
        pass


class Bench:
    """An engine with a slow runner, and what it reported."""

    def __init__(self) -> None:
        self.runner = SlowRunner()
        self.failures: list[Exception] = []
        self.engine = Engine(self._build, self.failures.append)

    def _build(self) -> Scheduler:
        return Scheduler(self.runner, max_running=8, max_prefill_tokens=64, weight_version="v0")

    def allow(self, steps: int) -> None:
        self.runner.permits.release(steps)


@pytest.fixture
async def bench():
    bench = Bench()
    await bench.engine.start()
    yield bench
    bench.allow(100_000)
    await bench.engine.stop(10)


def request(rid: str, new: int = 3, *, stream: bool = False) -> Request:
    params = SamplingParams(max_new_tokens=new)
    return Request(rid=rid, input_ids=[1, 2], params=params, stream=stream)


async def finished(item: Request) -> Request:
    async with asyncio.timeout(60):
        await item.woken.wait()
    assert item.finish is not None
    return item


async def test_submit_when_run_then_woken_at_the_end(bench: Bench):
    item = request("a")
    bench.engine.submit([item])
    bench.allow(3)
    assert (await finished(item)).output_ids == [7, 7, 7]


async def test_call_when_command_raises_then_the_caller_gets_it(bench: Bench):
    def command(scheduler: Scheduler) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await bench.engine.call(command, timeout=60)
    assert await bench.engine.call(lambda s: s.weight_version, timeout=60) == "v0"


async def test_call_when_exclusive_then_runs_between_old_and_new_requests(bench: Bench):
    old, new = request("old", 5), request("new", 2)
    bench.engine.submit([old])
    seen: list[tuple[bool, bool]] = []
    update = asyncio.create_task(
        bench.engine.call(
            lambda s: seen.append((old.finish is not None, bool(new.output_ids))),
            timeout=10,
            exclusive=True,
        )
    )
    await asyncio.sleep(0)
    bench.engine.submit([new])
    bench.allow(7)
    await update
    await finished(new)
    assert seen == [(True, False)]


async def test_call_when_exclusive_and_paused_then_runs_at_once(bench: Bench):
    item = request("a", stream=True)
    bench.engine.submit([item])
    bench.allow(1)
    await item.woken.wait()
    pausing = asyncio.create_task(bench.engine.call(lambda s: s.pause("in_place"), timeout=10))
    await asyncio.sleep(0)
    bench.allow(1)  # the engine may already be in its second step
    await pausing
    kept = await bench.engine.call(lambda s: len(s.running), timeout=10, exclusive=True)
    assert kept == 1
    await bench.engine.call(lambda s: s.resume(), timeout=10)
    bench.allow(2)
    item.woken.clear()
    while item.finish is None:
        await item.woken.wait()
        item.woken.clear()


async def test_call_when_deadline_passes_then_error_names_the_request_and_newcomers_run(
    bench: Bench,
):
    old, new = request("old", 50), request("new", 1)
    bench.engine.submit([old])
    bench.allow(1)
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for 1 running requests.*oldest: old"):
        await bench.engine.call(lambda s: None, timeout=0.2, exclusive=True)
    bench.engine.submit([new])
    bench.allow(49)
    assert (await finished(new)).output_ids == [7]
    await finished(old)


async def test_tell_when_request_runs_then_aborted(bench: Bench):
    item = request("a", 50)
    bench.engine.submit([item])
    bench.engine.tell(lambda s: s.abort({"a"}, "gone"))
    bench.allow(1)
    assert (await finished(item)).finish["message"] == "gone"


async def test_engine_when_a_step_fails_then_everyone_is_answered(bench: Bench):
    item = request("a")
    bench.engine.submit([item])
    pause = asyncio.create_task(bench.engine.call(lambda s: None, timeout=10, exclusive=True))
    await asyncio.sleep(0)
    bench.runner.broken = True
    bench.allow(1)
    await finished(item)
    assert item.finish["type"] == "abort"
    assert "no room" in item.finish["message"]
    with pytest.raises(EngineError, match="no room"):
        await pause
    with pytest.raises(EngineError, match="no room"):
        bench.engine.submit([request("b")])
    assert isinstance(bench.failures[0], MemoryError)


async def test_start_when_build_fails_then_raised_to_the_caller():
    def build() -> Scheduler:
        raise OSError("no weights")

    engine = Engine(build, lambda error: None)
    with pytest.raises(OSError, match="no weights"):
        await engine.start()
    await engine.stop(5)


async def test_stop_when_requests_are_left_then_they_are_answered():
    bench = Bench()
    await bench.engine.start()
    item = request("a", 50)
    bench.engine.submit([item])
    bench.allow(1)
    stopping = asyncio.create_task(bench.engine.stop(10))
    await asyncio.sleep(0)  # it is asked to stop before it may continue
    bench.allow(5)
    await stopping
    assert "engine stopped" in (await finished(item)).finish["message"]
