"""The pool when its workers are slow to load, lie, or work for callers that have left."""

from __future__ import annotations

import asyncio
import struct

import pytest
from tests.unit.areal_reward.test_reward_pool import running

from areal.v1 import reward_service_pb2 as pb
from areal_reward.frames import Kind, pack_results, unpack_results
from areal_reward.progress import LOADING
from areal_reward.recipes import RecipeCache


async def test_recipe_when_it_loads_longer_than_an_item_may_take_then_it_is_waited_for():
    gate = asyncio.Event()
    async with running(gate, timeout_s=0.05, load_timeout_s=60) as rig:
        call = asyncio.create_task(rig.score("7"))
        await asyncio.wait_for(rig.workers[0].asked.wait(), 60)
        rig.workers[0].progress.set(LOADING)
        await asyncio.sleep(0.3)  # six times what an item may take
        gate.set()
        assert [result.reward for result in await call] == [7.0]
        assert len(rig.workers) == 1


@pytest.mark.parametrize("positions", [[1], [4_000_000_000]])
async def test_worker_when_it_answers_for_an_item_that_it_was_not_sent_then_another_is_asked(
    positions,
):
    gate = asyncio.Event()
    async with running(gate, timeout_s=60) as rig:
        call = asyncio.create_task(rig.score("7"))
        await asyncio.wait_for(rig.workers[0].asked.wait(), 60)
        lie = pack_results(positions, [pb.ScoreResult(reward=666)])
        rig.workers[0].frames.put_nowait((Kind.DONE, lie))
        await asyncio.sleep(0)
        gate.set()
        assert [result.reward for result in await call] == [7.0]
        assert rig.workers[0].killed


async def test_queue_when_a_caller_leaves_then_its_items_make_room():
    gate = asyncio.Event()
    async with running(gate, max_waiting_items=10, timeout_s=60) as rig:
        call = asyncio.create_task(rig.score(*["1"] * 10))
        await asyncio.wait_for(rig.workers[0].asked.wait(), 60)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        gate.set()
        assert len(await rig.score(*["2"] * 10)) == 10
        await asyncio.wait_for(rig.pool.drain(), 60)


async def test_items_when_counted_then_each_by_its_outcome():
    async with running() as rig:
        await rig.score("1", "die", "2", "hang", "3")
        [metric] = rig.pool._metrics.items.collect()
    counts = {s.labels["outcome"]: s.value for s in metric.samples if s.name.endswith("_total")}
    assert counts == {"reward": 3, "crash": 1, "timeout": 1}


def test_results_when_a_frame_is_cut_or_does_not_add_up_then_it_is_none():
    one, two = pb.ScoreResult(reward=1), pb.ScoreResult(reward=2)
    assert unpack_results(pack_results([4, 9], [one, two])) == ([4, 9], [one, two])
    for body in (
        b"",
        b"\x01\x00",
        pack_results([4], [one, two]),
        pack_results([4, 9], [one]),
        struct.pack("=II", 2, 4),
        pack_results([4], [one]) + b"\xff",
    ):
        with pytest.raises(ValueError, match="results frame"):
            unpack_results(body)


async def test_recipes_when_more_are_asked_for_than_kept_then_the_one_not_used_longest_goes():
    fetched = []

    async def get_recipe(digest):
        fetched.append(digest)
        return f"{digest}.py", b""

    cache = RecipeCache(get_recipe, capacity=2)
    for digest in ("a", "b", "a", "c", "a"):  # when c comes, b has been unused for longest
        await cache.get(digest)
    assert fetched == ["a", "b", "c"]
    await cache.get("b")
    assert fetched == ["a", "b", "c", "b"]
