"""The examples of docs/rewards.md run as a reader would run them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from tests.judge_server import judge_server

from areal.recipe import load_recipe
from areal.rewards.functions import resolve
from areal.v1 import reward_service_pb2 as pb

PAGE = Path(__file__).resolve().parents[4] / "docs" / "rewards.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
DATA = '{"answer": "4", "level": 1}'


def block(words: str) -> str:
    """The only example with these words."""
    [found] = [each for each in BLOCKS if words in each]
    return found


async def scored(source: str, *completions: str) -> pb.ScoreResult:
    """What a reward worker makes of the example, for a completion or a group."""
    item = pb.ScoreItem(prompt="2+2=", prompt_ids=[1], data_json=DATA)
    if len(completions) == 1:
        item.completion = completions[0]
    else:
        item.samples.extend(pb.Sample(completion=text, completion_ids=[7]) for text in completions)
    function = resolve(
        pb.RewardSpec(name="reward_fn", recipe_digest="d"), load_recipe(source.encode())
    )
    arguments, named = function.bind(item)
    value: Any = function.call(arguments, named)
    return function.result(await value if inspect.isawaitable(value) else value, item)


def test_page_when_read_then_each_of_its_examples_is_run_here():
    assert len(BLOCKS) == 4


async def test_first_example_when_run_then_only_the_answer_is_right():
    source = block("return float(completions.strip() == answer)")
    assert [(await scored(source, text)).reward for text in (" 4 ", "5")] == [1.0, 0.0]


async def test_parts_example_when_run_then_each_part_is_there(monkeypatch: pytest.MonkeyPatch):
    made = block("judge = Judge(").partition("async def")[0].replace("judge.sqlite", ":memory:")
    async with judge_server(says_seven) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
        result = await scored(made + block("clear=(await judge("), "4")
    assert result.reward == pytest.approx(1 + 0.2 + 0.35)
    assert dict(result.parts) == {"correct": 1.0, "short": 1.0, "clear": 0.7}


async def test_group_example_when_run_then_the_shortest_right_answer_is_best():
    group = (await scored(block("@group_reward"), "4", "it is 4", "5")).group.samples
    assert [round(one.reward, 3) for one in group] == [1.2, 1.05, 0.2]
    assert dict(group[2].parts) == {"correct": 0.0, "short": 1.0}


async def test_group_example_when_a_completion_is_empty_then_the_task_does_not_fail():
    group = (await scored(block("@group_reward"), "4", "")).group.samples
    assert [round(one.reward, 3) for one in group] == [1.1, 0.2]


async def test_judge_example_when_run_then_its_score_is_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    async with judge_server(says_seven) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
        assert (await scored(block("judge = Judge("), "4")).reward == 0.7
        assert server.bodies[0]["model"] == "gpt-5-mini"
    assert (tmp_path / "judge.sqlite").exists()


async def says_seven(text: str) -> str:
    assert "2+2=" in text
    return "Good.\nScore: 7"
