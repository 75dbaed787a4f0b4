"""Reading tasks.jsonl: every malformed line is named."""

from __future__ import annotations

import json

import pytest

from areal.errors import InvalidInput
from areal.recipe import Recipe, load_recipe
from areal.types import GenerationHyperparameters, Purpose, WorkflowSpec
from areal.workflows.specs import build_workflow
from areal_launch.commands.tasks import describe_workflow_named, parse_tasks

DEFAULT = WorkflowSpec(name="rlvr", recipe_digest="", kwargs_json='{"reward_fn":"math"}')


def describe(name: str) -> WorkflowSpec:
    """What `areal submit` says of a name: only the default is known here."""
    if name != DEFAULT.name:
        raise InvalidInput(f"workflow.name {name!r}: unknown workflow")
    return DEFAULT


def test_parse_when_plain_rows_then_ids_are_made_from_line_numbers() -> None:
    lines = ['{"prompt": "1+1=", "answer": "2"}', "", '{"task_id": "mine", "prompt": "2+2="}']
    first, second = parse_tasks(lines, "tasks.jsonl", DEFAULT, "submit-1", describe)
    assert (first.task_id, second.task_id) == ("submit-1-1", "mine")
    assert first.data == {"prompt": "1+1=", "answer": "2"}
    assert second.data == {"prompt": "2+2="}
    assert first.purpose is Purpose.SERVE
    assert first.workflow == DEFAULT


def test_parse_when_data_is_given_then_its_neighbours_are_the_tasks() -> None:
    row = {
        "task_id": "t",
        "data": {"purpose": "kept"},
        "workflow": "MyWorkflow",
        "kwargs": {"turns": 2},
        "purpose": "train",
        "time_to_live_s": 5,
    }
    (task,) = parse_tasks([json.dumps(row)], "f", DEFAULT, "p", describe)
    assert task.data == {"purpose": "kept"}
    assert task.workflow.name == "MyWorkflow"
    assert json.loads(task.workflow.kwargs_json) == {"turns": 2}
    assert task.purpose is Purpose.TRAIN
    assert task.time_to_live_s == 5


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": ', "f:2: not JSON"),
        ("[1]", "f:2: expected a JSON object, got list"),
        ('{"data": 3}', "f:2: data 3: expected a JSON object"),
        ('{"data": {}, "purpos": "train"}', "f:2: unknown key 'purpos'"),
        ('{"data": {}, "purpose": "play"}', "f:2: purpose 'play': expected train or serve"),
        ('{"data": {}, "task_id": "a b"}', "f:2: task_id 'a b'"),
        ('{"data": {}, "time_to_live_s": -1}', "f:2: time_to_live_s -1"),
        ('{"data": {}, "workflow": 3}', "f:2: workflow 3"),
        ('{"data": {}, "kwargs": []}', "f:2: kwargs []: expected a JSON object"),
    ],
)
def test_parse_when_a_line_is_malformed_then_its_number_is_named(line: str, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_tasks(['{"prompt": "fine"}', line], "f", DEFAULT, "p", describe)
    assert str(caught.value).startswith(expected)


def test_parse_when_empty_then_refused() -> None:
    with pytest.raises(InvalidInput, match="f: has no tasks"):
        parse_tasks(["", "  "], "f", DEFAULT, "p", describe)


RECIPE = Recipe(
    "mine.py",
    b"""
from areal import RLVRWorkflow, RolloutWorkflow

def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    return 0.25

class Plain(RolloutWorkflow):
    def __init__(self, turns=2):
        self.turns = turns

    async def arun_episode(self, engine, data):
        return None
""",
)


@pytest.mark.parametrize("name", ["rlvr", "RLVRWorkflow"])
def test_describe_when_the_recipe_has_a_reward_then_it_scores(name: str) -> None:
    gconfig = GenerationHyperparameters(n_samples=3)
    spec = describe_workflow_named(RECIPE, gconfig, "", name)
    workflow = build_workflow(spec, load_recipe(RECIPE.source, RECIPE.file_name))
    assert workflow.reward_fn("p", "c", [], []) == 0.25  # type: ignore[attr-defined]
    assert workflow.gconfig == gconfig  # type: ignore[attr-defined]
    assert spec.recipe_digest == RECIPE.digest


def test_describe_when_a_reward_is_named_then_it_wins_over_the_recipes() -> None:
    spec = describe_workflow_named(RECIPE, GenerationHyperparameters(), "regex", "rlvr")
    assert json.loads(spec.kwargs_json)["reward_fn"] == "regex"


def test_describe_when_the_workflow_takes_no_reward_then_it_gets_none() -> None:
    spec = describe_workflow_named(RECIPE, GenerationHyperparameters(), "", "Plain")
    assert json.loads(spec.kwargs_json) == {}
    with pytest.raises(InvalidInput, match="--reward 'math': workflow 'Plain' takes no reward_fn"):
        describe_workflow_named(RECIPE, GenerationHyperparameters(), "math", "Plain")


def test_describe_when_nobody_knows_the_workflow_then_the_nearest_is_named() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'Plain'"):
        describe_workflow_named(RECIPE, GenerationHyperparameters(), "", "Plane")


def test_parse_when_a_row_names_an_unknown_workflow_then_its_line_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^f:1: workflow.name 'other': unknown"):
        parse_tasks(['{"data": {}, "workflow": "other"}'], "f", DEFAULT, "p", describe)
