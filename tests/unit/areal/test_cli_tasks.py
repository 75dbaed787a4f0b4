"""Reading tasks.jsonl: every malformed line is named."""

from __future__ import annotations

import json

import pytest

from areal.cli_tasks import parse_tasks
from areal.errors import InvalidInput
from areal.types import Purpose, WorkflowSpec

DEFAULT = WorkflowSpec(name="rlvr", recipe_digest="", kwargs_json='{"reward_fn":"math"}')


def test_parse_when_plain_rows_then_ids_are_made_from_line_numbers() -> None:
    lines = ['{"prompt": "1+1=", "answer": "2"}', "", '{"task_id": "mine", "prompt": "2+2="}']
    first, second = parse_tasks(lines, "tasks.jsonl", DEFAULT, "submit-1")
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
    (task,) = parse_tasks([json.dumps(row)], "f", DEFAULT, "p")
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
        ('{"data": 3}', "f:2: data: expected a JSON object"),
        ('{"data": {}, "purpos": "train"}', "f:2: unknown key 'purpos'"),
        ('{"data": {}, "purpose": "play"}', "f:2: purpose 'play': expected train or serve"),
        ('{"data": {}, "task_id": "a b"}', "f:2: task_id 'a b'"),
        ('{"data": {}, "time_to_live_s": -1}', "f:2: time_to_live_s -1"),
        ('{"data": {}, "workflow": 3}', "f:2: workflow 3"),
        ('{"data": {}, "kwargs": []}', "f:2: kwargs: expected a JSON object"),
    ],
)
def test_parse_when_a_line_is_malformed_then_its_number_is_named(line: str, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_tasks(['{"prompt": "fine"}', line], "f", DEFAULT, "p")
    assert str(caught.value).startswith(expected)


def test_parse_when_empty_then_refused() -> None:
    with pytest.raises(InvalidInput, match="f: no tasks in it"):
        parse_tasks(["", "  "], "f", DEFAULT, "p")
