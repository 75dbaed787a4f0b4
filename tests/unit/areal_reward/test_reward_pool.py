"""The pool against workers that are scripted, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from areal.errors import NotFound, Unavailable
from areal.rewards import CHECKERS
from areal.v1 import reward_service_pb2 as pb
from areal_reward import pool as pool_module
from areal_reward.config import RewardConfig
from areal_reward.frames import Kind, pack_results
from areal_reward.metrics import RewardMetrics
from areal_reward.pool import WorkerPool
from areal_reward.progress import IDLE, LOADING, Progress
from areal_reward.recipes import RecipeCache

SPEC = pb.RewardSpec(name="f")


class ScriptedWorker:
    """Acts on each completion as it reads: a number is its reward, a word is a misfortune."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.progress, file = Progress.create()
        file.close()
        self.frames: asyncio.Queue[tuple[Kind, bytes] | None] = asyncio.Queue()
        self.gate = gate
        self.killed = False
        self.requests = 0
        self.recipe = ""
        self.asked = asyncio.Event()

    def accepts(self, digest: str) -> bool:
        return not digest or self.recipe in ("", digest)

    async def send(self, request, digest, recipe):
        self.requests += 1
        self.recipe = digest or self.recipe
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        positions, results = [], []
        for position, item in enumerate(pb.ScoreRequest.FromString(request).items):
            word = item.completion
            self.progress.set(position)
            if word == "partial":  # results so far are sent, then this item continues
                self.frames.put_nowait((Kind.RESULTS, pack_results(positions, results)))
                positions, results = [position], [pb.ScoreResult(reward=-1)]
                continue
            if word == "hang":
                return
            if word == "future":  # what a function can write into the memory it shares
                self.progress._cells[1] += 3600 * 10**9
                return
            if word == "renews":  # a thread that a function has left running
                self.renewing = asyncio.create_task(self._renew(position))
                return
            if word == "die":
                self.frames.put_nowait(None)
                return
            if word == "die-idle":
                self.progress.set(IDLE)
                self.frames.put_nowait(None)
                return
            if word == "load-forever":
                self.progress.set(LOADING)
                return
            if word == "garbage":
                self.frames.put_nowait((Kind.RESULTS, b"\x09"))
                return
            if word == "no-memory":
                positions.append(position)
                results.append(pb.ScoreResult(failure=pb.ScoreFailure(error=pb.SCORE_ERROR_CRASH)))
                self.frames.put_nowait((Kind.STOPPED, pack_results(positions, results)))
                return
            positions.append(position)
            results.append(pb.ScoreResult(reward=float(word)))
        self.progress.set(IDLE)
        self.frames.put_nowait((Kind.DONE, pack_results(positions, results)))

    async def _renew(self, position):
        while not self.killed:
            self.progress.set(position)
            await asyncio.sleep(0.01)

    async def read(self):
        return await self.frames.get()

    def kill(self):
        if not self.killed:
            self.killed = True
            self.frames.put_nowait(None)

    async def end(self):
        self.kill()
        return "exit code 3"


class Rig:
    def __init__(self, pool: WorkerPool, workers: list[ScriptedWorker]) -> None:
        self.pool, self.workers = pool, workers

    async def score(self, *words: str) -> list[pb.ScoreResult]:
        items = [pb.ScoreItem(completion=word) for word in words]
        return await asyncio.wait_for(self.pool.score(SPEC, items, None), 60)


@asynccontextmanager
async def running(gate: asyncio.Event | None = None, **config) -> AsyncIterator[Rig]:
    workers: list[ScriptedWorker] = []

    async def start() -> ScriptedWorker:
        workers.append(ScriptedWorker(gate))
        return workers[-1]

    settings = RewardConfig(**{"timeout_s": 0.1, "load_timeout_s": 0.2, **config})
    pool = WorkerPool(settings, start, RewardMetrics(CollectorRegistry()))
    slots = [asyncio.create_task(pool.run_slot()) for _ in range(settings.workers)]
    await asyncio.wait_for(pool.wait_ready(), 60)
    try:
        yield Rig(pool, workers)
    finally:
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        assert all(worker.killed for worker in workers)


def _errors(results):
    return [r.failure.error if r.WhichOneof("outcome") == "failure" else None for r in results]


async def test_pool_when_items_are_good_then_rewards_in_order_from_several_workers():
    async with running(workers=3) as rig:
        words = [str(n) for n in range(50)]
        assert [r.reward for r in await rig.score(*words)] == [float(n) for n in range(50)]
        assert sum(worker.requests > 0 for worker in rig.workers) == 3


async def test_pool_when_one_item_hangs_then_only_it_fails():
    async with running() as rig:
        results = await rig.score("1", "hang", "2", "3")
        assert _errors(results) == [None, pb.SCORE_ERROR_TIMEOUT, None, None]
        assert "reward.timeout_s = 0.1 s" in results[1].failure.message
        assert [results[i].reward for i in (0, 2, 3)] == [1, 2, 3]
        assert len(rig.workers) == 2


@pytest.mark.parametrize("name", sorted(CHECKERS))
async def test_pool_when_a_built_in_checker_is_too_slow_then_0_for_that_item_alone(name):
    async with running() as rig:
        items = [pb.ScoreItem(completion=word) for word in ("1", "hang", "2", "hang")]
        scored = rig.pool.score(pb.RewardSpec(name=name), items, None)
        results = await asyncio.wait_for(scored, 60)
        assert [r.reward for r in results] == [1.0, 0.0, 2.0, 0.0]
        assert [dict(r.parts) for r in results] == [{}, {"timeouts": 1.0}, {}, {"timeouts": 1.0}]


@pytest.mark.parametrize(("name", "digest"), [("math", "a" * 64), ("reward_model", "")])
async def test_pool_when_another_function_is_too_slow_then_it_has_no_reward(name, digest):
    async with running() as rig:
        recipe = ("recipe.py", b"") if digest else None
        spec = pb.RewardSpec(name=name, recipe_digest=digest)
        (result,) = await asyncio.wait_for(
            rig.pool.score(spec, [pb.ScoreItem(completion="hang")], recipe), 60
        )
        assert result.failure.error == pb.SCORE_ERROR_TIMEOUT


async def test_pool_when_an_item_claims_to_begin_in_the_future_then_it_is_overdue():
    async with running() as rig:
        results = await rig.score("1", "future", "2")
        assert _errors(results) == [None, pb.SCORE_ERROR_TIMEOUT, None]


async def test_pool_when_an_item_keeps_renewing_its_time_then_it_ends_all_the_same(monkeypatch):
    monkeypatch.setattr(pool_module, "_SILENCE_MARGIN_S", 0.2)
    async with running() as rig:
        results = await rig.score("1", "renews", "2")
        assert _errors(results) == [None, pb.SCORE_ERROR_TIMEOUT, None]


async def test_pool_when_a_worker_has_had_another_recipe_then_ended_and_replaced():
    async with running() as rig:
        for digest, workers in (("", 1), ("a", 1), ("", 1), ("a", 1), ("b", 2), ("", 2)):
            spec = pb.RewardSpec(name="f", recipe_digest=digest)
            item = pb.ScoreItem(completion="1")
            recipe = ("recipe.py", b"") if digest else None
            (result,) = await asyncio.wait_for(rig.pool.score(spec, [item], recipe), 60)
            assert result.reward == 1.0
            assert len(rig.workers) == workers, digest
        assert [worker.killed for worker in rig.workers] == [True, False]


async def test_pool_when_worker_dies_then_only_its_item_fails_and_says_how():
    async with running() as rig:
        results = await rig.score("1", "die", "2", "die", "3")
        crash = pb.SCORE_ERROR_CRASH
        assert _errors(results) == [None, crash, None, crash, None]
        assert "exit code 3" in results[1].failure.message
        assert len(rig.workers) == 3


async def test_pool_when_results_came_before_the_end_then_they_stay():
    async with running() as rig:
        results = await rig.score("1", "2", "partial", "hang")
        assert [r.reward for r in results[:2]] == [1, 2]
        # "partial" had not been sent: done again by the next worker, to the same end.
        assert results[2].reward == -1
        assert results[3].failure.error == pb.SCORE_ERROR_TIMEOUT


async def test_pool_when_memory_runs_out_then_rest_goes_to_a_fresh_worker():
    async with running() as rig:
        results = await rig.score("1", "no-memory", "2")
        assert _errors(results) == [None, pb.SCORE_ERROR_CRASH, None]
        assert len(rig.workers) == 2


@pytest.mark.parametrize("word", ["die-idle", "garbage"])
async def test_pool_when_workers_die_again_without_an_item_then_pending_fail(word):
    async with running() as rig:
        results = await rig.score("1", word)
        assert results[-1].failure.error == pb.SCORE_ERROR_CRASH
        assert [r.reward for r in await rig.score("5")] == [5]


async def test_pool_when_loading_never_ends_then_all_items_say_so():
    async with running() as rig:
        results = await rig.score("load-forever", "1")
        assert _errors(results) == [pb.SCORE_ERROR_TIMEOUT] * 2
        assert "loading its recipe took longer than 0.2 s" in results[0].failure.message


async def test_pool_when_queue_is_full_then_refused_and_later_welcome():
    gate = asyncio.Event()
    async with running(gate, max_waiting_items=10, timeout_s=5) as rig:
        first = asyncio.create_task(rig.score(*["1"] * 20))  # alone: let in
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match=r"20 items are waiting.*limit of 10"):
            await rig.score("2")
        gate.set()
        assert len(await first) == 20
        assert [r.reward for r in await rig.score("2")] == [2]


async def test_pool_when_caller_goes_then_its_job_is_dropped():
    async with running(timeout_s=30) as rig:
        call = asyncio.create_task(rig.score("hang"))
        await asyncio.wait_for(rig.workers[0].asked.wait(), 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [r.reward for r in await rig.score("2")] == [2]
        assert rig.workers[0].killed


async def test_pool_when_draining_then_accepted_finish_and_new_are_refused():
    gate = asyncio.Event()
    async with running(gate, timeout_s=5) as rig:
        accepted = asyncio.create_task(rig.score("1"))
        await asyncio.sleep(0)
        draining = asyncio.create_task(rig.pool.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            await rig.score("2")
        assert not draining.done()
        gate.set()
        await asyncio.wait_for(draining, 60)
        assert [r.reward for r in await accepted] == [1]


async def test_recipes_when_asked_together_then_fetched_once_and_failures_are_forgotten():
    calls = []

    async def get_recipe(digest):
        calls.append(digest)
        await asyncio.sleep(0)
        if digest == "bad" and calls.count("bad") == 1:
            raise NotFound("recipe bad: unknown")
        return f"{digest}.py", b""

    cache = RecipeCache(get_recipe, capacity=2)
    assert await asyncio.gather(cache.get("a"), cache.get("a")) == [("a.py", b"")] * 2
    assert calls == ["a"]
    with pytest.raises(NotFound):
        await cache.get("bad")
    assert await cache.get("bad") == ("bad.py", b"")
    await cache.get("c")
    await cache.get("a")  # had been the oldest of three
    assert calls == ["a", "bad", "bad", "c", "a"]
