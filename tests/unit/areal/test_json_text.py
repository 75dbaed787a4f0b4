"""JSON with integers of any size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import InvalidInput
from areal.protocol.trajectories import task_from_pb, task_to_pb
from areal.tokenizer.json_text import dumps, json_object, loads
from areal.types import Purpose, Task, WorkflowSpec

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab1\u2028\u0085é\n", max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(VALUES)
def test_value_when_written_and_read_then_it_is_the_same(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert loads(dumps(value).decode()) == value


@pytest.mark.parametrize("text", ["NaN", "1e400", '"\\ud800"', "1" * 5000, "{", "[" * 2000])
def test_text_when_not_json_then_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(text)


def test_value_when_not_of_json_then_type_error_as_always() -> None:
    with pytest.raises(TypeError):
        dumps({"n": 2**70, "what": object()})


def test_row_when_it_has_a_long_integer_then_a_task_carries_it() -> None:
    task = Task("t", Purpose.TRAIN, WorkflowSpec("w", ""), {"answer": 3**90, "low": [-(2**64)]})
    assert task_from_pb(task_to_pb(task)).data == task.data


@pytest.mark.parametrize(
    ("value", "expected"),
    [({"a": 1}, {"a": 1}), ('{"a": 1}', {"a": 1}), ("", {}), (" ", {}), (None, {})],
)
def test_object_when_it_may_be_text_then_it_is_read_once(value: Any, expected: Any) -> None:
    assert json_object(value, "f") == expected


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("{", r"call\.arguments: not JSON: '\{'"),
        ('"{}"', r"call\.arguments: expected a JSON object, got str"),
        ([1], r"call\.arguments: expected a JSON object, got list"),
    ],
)
def test_object_when_it_is_none_then_refused_and_named(value: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        json_object(value, "call.arguments")
