"""A recipe's judge in a worker of the reward service: its key, its budget, and an endpoint away."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.integration import test_reward_service as rig
from tests.judge_server import judge_server

from areal.errors import NotFound
from areal.protocol.scores import ScoreError, ScoreFailure, ScoreItem
from areal.v1 import buffer_service_pb2

RECIPE = b"""
from areal import rubric
from areal.rewards.judge import Judge

judge = Judge("grader", timeout_s=3.0, max_calls=8)

async def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    return await judge(prompt=prompt, completion=completions)

async def both(prompt, completions):
    return rubric(right=await judge(prompt=prompt, completion=completions), digits=(1, 0.5))
"""
DIGEST = hashlib.sha256(RECIPE).hexdigest()
KEY = "sk-of-the-judge-1234"


class Recipes(rig.Recipes):
    async def GetRecipe(self, request, context):
        if request.digest != DIGEST:
            raise NotFound("unknown digest")
        return buffer_service_pb2.GetRecipeResponse(file_name="mine.py", source=RECIPE)


def items(*completions: str) -> list[ScoreItem]:
    return [ScoreItem("How much is 2+2?", completion) for completion in completions]


async def test_judge_when_a_recipe_has_one_then_workers_ask_it_and_its_absence_is_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(text: str) -> str:
        return "Right. Score: 10" if "\n4\n" in text else "Wrong. Score: 1"

    monkeypatch.setattr(rig, "Recipes", Recipes)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with judge_server(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        async with rig.reward_service(tmp_path) as service, rig.reward_client(service) as client:
            first = await client.score("reward_fn", DIGEST, {}, items("4", "5", "4", "4"))
            assert first == [1.0, 0.1, 1.0, 1.0]
            assert len(server.bodies) == 2
            assert set(server.keys) == {f"Bearer {KEY}"}
            # What is known costs nothing, and stays known to the worker.
            assert await client.score("reward_fn", DIGEST, {}, items("5")) == [0.1]
            assert len(server.bodies) == 2
            [whole] = await client.score("both", DIGEST, {}, items("5"))
            assert (whole, whole.parts) == (0.6, {"right": 0.1, "digits": 1.0})
            more = await client.score("reward_fn", DIGEST, {}, items(*map(str, range(6, 13))))
            [spent] = [each for each in more if isinstance(each, ScoreFailure)]
            assert spent.error is ScoreError.FUNCTION
            assert "judge grader: its budget is spent: 8 calls (max_calls: 8)" in spent.message
            assert KEY not in service.text()
    folder = tmp_path / "away"
    folder.mkdir()
    async with rig.reward_service(folder) as service, rig.reward_client(service) as client:
        [known_no_more] = await client.score("reward_fn", DIGEST, {}, items("4"))
        assert isinstance(known_no_more, ScoreFailure)
        assert known_no_more.error is ScoreError.CRASH  # the task is tried again
        assert known_no_more.message.startswith("reward_fn: judge grader at 127.0.0.1: no")
