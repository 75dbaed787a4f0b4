import asyncio
import hashlib
import sys

import pytest

from areal.errors import InvalidInput, NotFound, Unavailable
from areal.types import WorkflowSpec
from areal_rollout.workflows import WorkflowCache

SOURCE = b"""
from areal.workflows.base import RolloutWorkflow

class Mine(RolloutWorkflow):
    def __init__(self, turns=1):
        self.turns = turns
    async def arun_episode(self, engine, data):
        return None
"""
DIGEST = hashlib.sha256(SOURCE).hexdigest()


class Ledger:
    def __init__(self):
        self.recipes, self.fetched, self.error = {DIGEST: ("r.py", SOURCE)}, 0, None

    async def get_recipe(self, digest):
        self.fetched += 1
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        if digest not in self.recipes:
            raise NotFound(f"recipe {digest}")
        return self.recipes[digest]


def spec(name="Mine", kwargs="{}", digest=DIGEST):
    return WorkflowSpec(name, digest, kwargs)


async def test_cache_when_asked_often_then_fetches_once_and_shares_the_object():
    ledger = Ledger()
    cache = WorkflowCache(ledger.get_recipe)
    same = await asyncio.gather(*[cache.get(spec()) for _ in range(50)])
    assert len({id(w) for w in same}) == 1
    other = await cache.get(spec(kwargs='{"turns":2}'))
    assert (same[0].turns, other.turns) == (1, 2)
    assert type(other) is type(same[0])
    assert ledger.fetched == 1


async def test_cache_when_fetching_fails_then_not_remembered():
    ledger = Ledger()
    cache = WorkflowCache(ledger.get_recipe)
    ledger.error = Unavailable("away")
    with pytest.raises(Unavailable):
        await cache.get(spec())
    ledger.error = None
    assert (await cache.get(spec())).turns == 1


async def test_cache_when_the_first_to_ask_gives_up_then_the_others_still_get_it():
    cache = WorkflowCache(Ledger().get_recipe)
    first = asyncio.create_task(cache.get(spec()))
    second = asyncio.create_task(cache.get(spec()))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).turns == 1


@pytest.mark.parametrize(
    ("digest", "source", "message"),
    [
        ("0" * 64, None, "no such recipe"),
        ("0" * 64, SOURCE, "its source has another digest"),
        (hashlib.sha256(b"def f(:").hexdigest(), b"def f(:", r"recipe r\.py:1: "),
    ],
)
async def test_cache_when_the_recipe_is_bad_then_one_clear_line(digest, source, message):
    ledger = Ledger()
    if source is not None:
        ledger.recipes[digest] = ("r.py", source)
    with pytest.raises(InvalidInput, match=message):
        await WorkflowCache(ledger.get_recipe).get(spec(digest=digest))


async def test_cache_when_a_recipe_loads_then_the_loop_is_not_blocked():
    source = b"import time; time.sleep(0.3)\n" + SOURCE
    digest = hashlib.sha256(source).hexdigest()
    ledger = Ledger()
    ledger.recipes[digest] = ("slow.py", source)
    task = asyncio.create_task(WorkflowCache(ledger.get_recipe).get(spec(digest=digest)))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 3, "blocked, it would be one"
    assert f"areal_recipe_{digest[:16]}" in sys.modules
