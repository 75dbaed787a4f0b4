"""JSON with integers of any size."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import InvalidInput
from areal.protocol.trajectories import task_from_pb, task_to_pb
from areal.tokenizer.json_text import MAX_DEPTH, TooDeep, canonical, dumps, json_object, loads
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


BIG = "123456789012345678901234567890"
REFUSED = ["NaN", "1e400", "-Infinity", '"\\ud800"', "{", '"\t"', "[1,]", "01", "\ufeff1"]


@pytest.mark.parametrize(
    "text",
    [
        *REFUSED,
        # The same beside an integer that another parser reads.
        *(f"[{BIG}, {text}]" for text in REFUSED),
        "1" * 5000,
        "[" * 2000,
        f"[{BIG}," + "[" * 2000,
        "[" * 2000 + BIG + "]" * 2000,
    ],
)
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


@pytest.mark.parametrize("inside", ["1", BIG])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_text_when_nested_deeper_than_can_be_written_then_too_deep(inside, left, right):
    deepest = left * MAX_DEPTH + inside + right * MAX_DEPTH
    assert loads(dumps(loads(deepest))) == loads(deepest)
    canonical(loads(deepest))
    for depth in (MAX_DEPTH + 1, 254, 300, 900, 3000, 100_000):
        with pytest.raises(TooDeep, match="expected 200 levels at most"):
            loads(left * depth + inside + right * depth)


@pytest.mark.parametrize("digits", [18, 19, 20, 309, 400, 4300])
def test_integer_when_of_any_size_then_read_and_written_digit_for_digit(digits):
    text = "7" * digits
    assert str(loads(f'{{"a": -{text}}}')["a"]) == f"-{text}"
    assert dumps(loads(text)) == text.encode()
    assert canonical(loads(text))


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        # RFC 8785, appendix B
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("ffefffffffffffff", "-1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555554", "333333333.33333325"),
        ("41b3de4355555555", "333333333.3333333"),
        ("41b3de4355555556", "333333333.3333334"),
        ("41b3de4355555557", "333333333.33333343"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_number_when_canonical_then_as_the_rfc_says(bits, text):
    [value] = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical(value) == text.encode()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_number_when_canonical_then_it_is_the_same_number(value: float) -> None:
    assert float(canonical(value)) == value
    assert canonical(json.loads(canonical(value))) == canonical(value)


@given(VALUES)
def test_value_when_canonical_then_one_text_however_it_is_written(value: Any) -> None:
    text = canonical(value)
    assert canonical(loads(json.dumps(value, indent=2))) == text
    assert canonical(loads(text)) == text


def test_value_when_canonical_then_sorted_by_utf_16_and_escaped_as_the_rfc_says():
    value = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\xf6": 7}
    keys = [key for key, _ in json.loads(canonical(value), object_pairs_hook=list)]
    assert keys == ["\r", "1", "\x80", "\xf6", "\u20ac", "\U0001f600", "\ufb33"]
    assert canonical('\u20ac$\x0f\nA\'B"\\\\"/\x7f') == (
        '"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/\x7f"'.encode()
    )


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), ([1e2], [100]), ({"a": 1, "b": -0.0}, {"b": 0, "a": 1})]
)
def test_values_when_the_same_to_javascript_then_one_text(one, other):
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, "1"), ([], {}), (None, "null"), (1, 2)])
def test_values_when_different_then_two_texts(one, other):
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, float("nan"), float("inf"), 10**4000])
def test_value_when_no_json_has_it_then_canonical_does_not_raise(value):
    assert canonical(value)
