"""What a rollout service tells of recipes that fail: the first attempt, by file and line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.buffer_client import BufferClient
from tests.integration.stack_tools import eventually
from tests.rollout_stack import Stack, start_stack

from areal.recipe import load_recipe
from areal.types import GenerationHyperparameters, Purpose, Task
from areal.workflows.specs import describe_workflow

RECIPE = b"""
from areal.types import GenerationHyperparameters, LLMRequest
from areal.workflows.base import RolloutWorkflow, make_trajectory


def raises(completions, **data):
    return float(data["solution"])


def gives_none(completions, **data):
    completions == data["answer"]


def gives_text(completions, **data):
    return "correct"


def gives_nan(completions, **data):
    return float("nan")


class Plain(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig: GenerationHyperparameters):
        self.reward_fn, self.gconfig = reward_fn, gconfig

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(LLMRequest([1, 2], self.gconfig))
        [reward] = await engine.score(self.reward_fn, completions=["x"], data=data)
        return make_trajectory(response, reward)


class GivesDict(Plain):
    async def arun_episode(self, engine, data):
        return {"reward": 1.0}


class Raises(Plain):
    async def arun_episode(self, engine, data):
        number = int(data["answer"])
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A rollout service that would try a task three times."""
    with start_stack(tmp_path_factory.mktemp("stack"), servers=1) as whole:
        whole.service("rollout", whole.config.endpoints.rollout)
        whole.wait("rollout", whole.config.endpoints.rollout)
        eventually(
            lambda: whole.metric("rollout", "areal_rollout_serving_servers") == 1,
            "the rollout worker knows the server",
            30.0,
        )
        yield whole


@pytest.fixture
async def ledger(stack: Stack) -> AsyncIterator[BufferClient]:
    client = BufferClient(stack.config.endpoints.buffer)
    yield client
    await client.close()


def line_of(words: str) -> int:
    """In the recipe, from 1."""
    lines = RECIPE.decode().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if words in line)


@pytest.mark.parametrize(
    ("workflow", "reward", "site", "at", "words"),
    [
        ("Plain", "raises", "KeyError", '["solution"]', "raises raised KeyError: 'solution'"),
        ("Plain", "gives_none", "returned None", "def gives_none", "gives_none returned None: exp"),
        ("Plain", "gives_text", "returned str", "def gives_text", "gives_text returned str 'corr"),
        ("Plain", "gives_nan", "returned nan", "def gives_nan", "gives_nan returned nan: expected"),
        ("GivesDict", "raises", "returned dict", "class GivesDict", "arun_episode returned dict: "),
        ("Raises", "raises", "ValueError", "number = int(", "ValueError: invalid literal for int"),
    ],
)
async def test_recipe_when_it_fails_then_its_first_attempt_is_told_with_the_place(
    ledger: BufferClient, workflow: str, reward: str, site: str, at: str, words: str
) -> None:
    module = load_recipe(RECIPE, "/home/me/mine.py")
    await ledger.put_recipe("/home/me/mine.py", RECIPE)
    gconfig = GenerationHyperparameters(max_new_tokens=2)
    spec = describe_workflow(getattr(module, workflow)(getattr(module, reward), gconfig))
    line = line_of(at) + (1 if at.startswith("class") else 0)
    rows = [{"answer": f"no number {index}"} for index in range(4)]
    ids = [f"{workflow}-{reward}-{index}" for index in range(4)]
    await ledger.submit_tasks(
        [Task(i, Purpose.SERVE, spec, row) for i, row in zip(ids, rows, strict=True)]
    )
    since, found = time.monotonic(), []
    while not found:
        assert time.monotonic() - since < 60.0, f"nothing is told: {await ledger.get_stats()}"
        stats = await ledger.get_stats()
        found = [each for each in stats.failures if each.task_id in ids]
        await asyncio.sleep(0.05)
    [failure] = found  # however the rows differ
    assert failure.site == f"{site} at mine.py:{line}"
    assert words in failure.detail
    assert failure.detail.endswith(f" (/home/me/mine.py:{line})")
