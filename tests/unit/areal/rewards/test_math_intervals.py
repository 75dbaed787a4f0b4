"""Intervals, inequalities, sets by a condition and their unions; and infinity, which ends them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.rewards.math import math_reward

OUTSIDE = "(-\\infty,1)\\cup(3,\\infty)"
SAME = (
    (
        *("x>3", "3<x", "(3,\\infty)", "x\\in(3,+\\infty)", "3 < x < \\infty"),
        *("\\{x\\mid x>3\\}", "\\{x \\in \\mathbb{R} : 3 < x\\}"),
    ),
    ("x \\ge 3", "[3,\\infty)", "x\\in[3,\\infty)", "\\{x | x\\geq 3\\}"),
    ("0<x<1", "1 > x > 0", "(0,1)", "x\\in(0,1)", "\\{x\\mid 0<x<1\\}"),
    ("-1 \\le x < 4", "[-1,4)", "x\\in[-1,4)", "4 > x \\geq -1"),
    ("\\mathbb{R}", "x\\in\\mathbb{R}", "(-\\infty,\\infty)", "-\\infty<x<\\infty"),
    (
        *(OUTSIDE, f"x\\in{OUTSIDE}", "(3,\\infty)\\cup(-\\infty,1)", "x<1 \\cup x>3"),
        *("x<1\\text{ or }x>3", "x>3\\text{ or }x<1", "x < 1 \\lor 3 < x", "x<1, x>3"),
        "\\{x\\mid x<1\\text{ or }x>3\\}",
    ),
)


def scores(gold: str, text: str) -> bool:
    return math_reward(f"\\boxed{{{text}}}", gold) == 1.0


@pytest.mark.parametrize("group", SAME, ids=range(len(SAME)))
def test_math_when_a_set_of_numbers_has_several_spellings_then_all_are_the_same(group):
    others = [text for other in SAME if other is not group for text in other]
    for gold, text in itertools.product(group, repeat=2):
        assert scores(gold, text), (gold, text)
    for gold, text in itertools.product(group, others):
        assert not scores(gold, text), (gold, text)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("x>3", "y>3"),
        ("x>3", "y\\in(3,\\infty)"),
        ("x>3", "x=3"),
        ("x>3", "\\{3\\}"),
        (OUTSIDE, "x<1\\text{ and }x>3"),
        ("x<1\\text{ or }x>3", "x<1\\text{ and }x>3"),
        (OUTSIDE, "x<1\\text{ or }y>3"),
        (OUTSIDE, "x<1\\text{ or }x\\ge 3"),
        ("1<x<3", "x>1\\text{ or }x<3"),
        ("1<x<3", "x>1, x<3"),
        ("0<x<1", "(x,y)=(0,1)"),
        ("(0,1)", "\\{0,1\\}"),
        ("(0,1)", "\\{x\\mid 0<y<1\\}"),
        ("(0,1)", "\\{x\\in\\mathbb{Z}: 0<x<1\\}"),
        ("(0,1)", "(0,1)\\cup(1,2)"),
        ("x\\in\\mathbb{R}", "x\\in\\mathbb{Z}"),
        ("x>0, y>0", "x>0"),
    ],
)
def test_math_when_sets_of_numbers_differ_then_wrong(gold, text):
    assert not scores(gold, text)
    assert not scores(text, gold)


@pytest.mark.parametrize("gold", ["(1,2),(3,4)", "\\{(1,2),(3,4)\\}", "(3,4) and (1,2)"])
@pytest.mark.parametrize(
    "text",
    ["(1,2),(3,4)", "\\{(3,4),(1,2)\\}", "(1,2) or (3,4)", "(x,y)=(1,2) \\text{ or } (x,y)=(3,4)"],
)
def test_math_when_a_list_has_points_then_they_are_no_intervals(gold, text):
    assert scores(gold, text)
    assert not scores(gold.replace("4", "5"), text)


@settings(deadline=None)
@given(
    st.integers(-20, 20),
    st.integers(1, 20),
    st.sampled_from("xytn"),
    st.sampled_from([("(", "<"), ("[", "\\le")]),
    st.sampled_from([(")", "<"), ("]", "\\leq")]),
)
def test_math_when_an_interval_is_an_inequality_then_its_ends_decide(low, far, name, left, right):
    def both(high):
        interval = f"{left[0]}{low}, {high}{right[0]}"
        inequality = f"{low} {left[1]} {name} {right[1]} {high}"
        return interval, inequality, f"{name} \\in {interval}", f"\\{{{name} \\mid {inequality}\\}}"

    for gold, text in itertools.product(both(low + far), repeat=2):
        assert scores(gold, text)
    for gold, text in itertools.product(both(low + far), both(low + far + 1)):
        assert not scores(gold, text)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("0", "\\infty-\\infty"),
        ("0", "0\\cdot\\infty"),
        ("1", "\\infty/\\infty"),
        ("1", "\\frac{\\infty}{\\infty}"),
        ("1", "\\infty^0"),
        ("1", "1^{\\infty}"),
        ("x", "x+\\infty-\\infty"),
        ("\\infty", "2\\infty-\\infty"),
        ("\\infty", "-\\infty"),
    ],
)
def test_math_when_infinity_is_calculated_with_then_there_is_no_value(gold, text):
    assert not scores(gold, text)


@pytest.mark.parametrize("text", ["\\infty", "+\\infty", "∞", "infinity", "x = \\infty"])
def test_math_when_infinity_is_the_answer_then_it_equals_itself(text):
    assert scores("\\infty", text)
    assert not scores("-\\infty", text)
