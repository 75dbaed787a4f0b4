"""Labels, points, ratios, matrices, roots and decimals in the spellings that models use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.rewards.math import math_reward

MATRIX = "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"


def scores(gold: str, text: str) -> bool:
    return math_reward(f"\\boxed{{{text}}}", gold) == 1.0


@pytest.mark.parametrize(
    "label",
    [
        *("f^{-1}(x)", "P(X=2)", "P(X \\le 2)", "\\mathbb{P}(A)", "\\mathbb{E}[X]", "E[X]"),
        *("\\text{Var}(X)", "\\operatorname{rank}(A)", "\\frac{AB}{BC}", "AB/BC", "AB:BC"),
        *("a_{n+1}", "S_{\\triangle ABC}", "[ABC]", "V=\\pi r^2h", "x", "f(2)", "|AB|"),
        *("\\tan\\theta", "\\tan 2\\alpha", "\\tan(\\angle BAC)", "\\cot A", "x_1+x_2", "x_1x_2"),
        *("\\frac{a}{b}", "y/x", "\\frac{dy}{dx}", "\\frac{d^2y}{dx^2}", "\\dfrac{dV}{dt}"),
    ],
)
def test_math_when_a_value_has_a_label_then_the_value_counts(label):
    for value, other in (("\\frac{3}{2}", "\\frac{2}{3}"), ("3\\pi", "3"), ("5", "4")):
        assert scores(value, f"{label}={value}")
        assert scores(f"{label}={value}", value)
        assert not scores(other, f"{label}={value}")


@pytest.mark.parametrize(
    "side",
    [
        *("2x", "x^2", "x+1", "x^{-1}", "|x|", "\\sqrt{x}", "x(x+1)", "n(n+1)", "n!", "\\ln(x)"),
        *("abs(x)", "\\sqrt(x)", "\\log_2(x)", "sin(x)", "\\sin\\alpha", "2V=\\pi r^2"),
        *("\\tan x", "\\frac{x}{2}", "x^2+x", "\\cos A"),
    ],
)
def test_math_when_an_equation_is_not_solved_then_wrong(side):
    assert not scores("3", f"{side}=3")


@pytest.mark.parametrize(
    ("gold", "other"),
    [
        *(("\\sin\\theta", "\\cos\\theta"), ("\\sin A", "\\cos A"), ("\\sin A", "\\sin B")),
        *(("a+b", "a-b"), ("AB", "CD"), ("x_1+x_2", "x_1x_2"), ("\\frac ab", "\\frac ba")),
    ],
)
def test_math_when_the_value_is_of_another_name_then_wrong(gold, other):
    assert not scores(f"{gold}=\\frac{{1}}{{2}}", f"{other}=\\frac{{1}}{{2}}")
    assert scores(f"{gold}=\\frac{{1}}{{2}}", f"{gold}=0.5")


@pytest.mark.parametrize(
    ("gold", "other"),
    [
        *(("AB", "\\text{length}"), ("AB", "length AB"), ("[ABC]", "\\text{area}")),
        *(("a+b", "\\text{sum}"), ("a+b", "the sum"), ("a+b", "b+a"), ("a+b", "S")),
        *(("\\sin\\theta", "\\text{ratio}"), ("\\text{area}", "[ABC]"), ("AB", "|AB|")),
        *(("AB", "\\overline{AB}"), ("AB", "BA"), ("\\frac{AB}{CD}", "AB:CD"), ("xy", "product")),
    ],
)
def test_math_when_the_value_may_be_of_the_same_thing_then_right(gold, other):
    assert scores(f"{gold}=\\frac{{1}}{{2}}", f"{other}=0.5")


@pytest.mark.parametrize(
    ("gold", "texts"),
    [
        ("120", ["5!=120", "5! = 120", "\\frac{6!}{3!}=120"]),
        ("x\\ne 3", ["x != 3", "x \\neq 3"]),
        ("7:30 p.m.", ["7:30\\text{ p.m.}", "\\text{7:30 PM}", "7{:}30", "7\\!:\\!30"]),
        ("7:30\\text{ p.m.}", ["7:30\\text{ PM}", "7:30 \\mathrm{pm}", "7:30"]),
        ("(2,-3)", ["x=2, y=-3", "y=-3\\text{ and }x=2", "(x,y)=(2,-3)"]),
        ("x=2, y=-3", ["(2,-3)", "y=-3, x=2"]),
        ("(1,2,3)", ["a=1, b=2, c=3"]),
        ("3:2", ["\\frac32", "3/2", "3\\text{ to }2", "3 \\colon 2", "3\\mathbin{:}2"]),
        ("\\frac{3}{2}", ["3:2", "3 to 2"]),
        ("3 to 2", ["3:2"]),
        ("1/3", ["0.(3)", "0.333\\ldots", "0.333...", "0.333…"]),
        ("1/6", ["0.1666\\ldots"]),
        ("4/33", ["0.121212\\dots"]),
        ("-2", ["\\sqrt[3]{-8}", "\\sqrt[5]{-32}", "-\\sqrt[3]{8}"]),
        ("-\\sqrt[3]{4}", ["\\sqrt[3]{-4}"]),
        ("x^{1/3}", ["\\sqrt[3]{x}"]),
        (
            MATRIX,
            [
                "\\left[\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right]",
                "\\left[\\begin{matrix}1&2\\\\3&4\\end{matrix}\\right]",
                "A = \\left(\\begin{array}{c c}1&2\\\\3&4\\end{array}\\right)",
            ],
        ),
    ],
)
def test_math_when_an_answer_has_several_spellings_then_all_are_right(gold, texts):
    assert [text for text in texts if not scores(gold, text)] == []


@pytest.mark.parametrize(
    ("gold", "texts"),
    [
        ("120", ["5!=121", "5 != 120", "n!=120"]),
        ("7:30 p.m.", ["7:30\\text{ a.m.}", "7/30"]),
        ("7:08 pm", ["7 to 8 pm"]),
        ("6:15", ["12:30"]),
        ("18", ["18:00", "18:1"]),
        ("\\frac{3}{2}", ["6:4", "2:3"]),
        ("3:2", ["2:3", "6:4", "\\frac23", "3 to 20"]),
        ("(2,-3)", ["x=-3, y=2", "x=2, x=-3", "x=2\\text{ or }y=-3", "a=2"]),
        ("[2,3]", ["x=2, y=3"]),
        ("(2,1)", ["a=1, b=2"]),
        ("0.333", ["0.333\\ldots", "0.333..."]),
        ("1/3", ["0.33\\ldots", "0.3", "0.(6)"]),
        ("5", ["5...", "5\\ldots"]),
        ("2", ["\\sqrt[3]{-8}"]),
        ("-2", ["\\sqrt[4]{-16}", "\\sqrt{-4}"]),
        (
            MATRIX,
            [
                "\\left|\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right|",
                "\\left[\\begin{array}{cc}1&3\\\\2&4\\end{array}\\right]",
            ],
        ),
    ],
)
def test_math_when_a_spelling_says_something_else_then_wrong(gold, texts):
    assert [text for text in texts if scores(gold, text)] == []


@pytest.mark.parametrize(
    ("text", "right"),
    [("Hence, 42.", 1.0), ("Hence 42", 1.0), ("Thus, $x = 42$.", 1.0), ("So, 41, 42", 0.0)],
)
def test_math_when_a_line_begins_with_a_connective_then_the_rest_counts(text, right):
    assert math_reward(text, "42") == right


@settings(deadline=None)
@given(st.integers(0, 99), st.integers(1, 999), st.sampled_from(["...", "\\ldots", "…", "\\dots"]))
def test_math_when_a_decimal_repeats_then_it_is_its_fraction(whole, block, dots):
    gold = f"{whole}+\\frac{{{block}}}{{{10 ** len(str(block)) - 1}}}"
    assert scores(gold, f"{whole}.({block})")
    assert scores(gold, f"{whole}.{str(block) * 3}{dots}")
    assert not scores(gold, f"{whole}.{str(block) * 3}0{dots}")


@settings(deadline=None)
@given(st.integers(-1000, 1000), st.sampled_from([3, 5, 7]))
def test_math_when_the_degree_of_a_root_is_odd_then_it_has_the_sign_of_its_argument(base, degree):
    assert scores(str(base), f"\\sqrt[{degree}]{{{base**degree}}}")
    assert scores(str(base), f"\\sqrt[{degree}]{{{-(base**degree)}}}") == (base == 0)
