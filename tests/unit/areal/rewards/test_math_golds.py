"""Right answers of all types: numbers of any size, decimals, fractions, and what is refused."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.errors import InvalidInput
from areal.rewards.math import math_reward


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        (1e-05, "0.00001", 1.0),
        (1e-05, "10^{-5}", 1.0),
        (1e-05, "0", 0.0),
        (1.2e-05, "0.000012", 1.0),
        (1.2e-05, "1.2\\times10^{-5}", 1.0),
        (1e16, "10000000000000000", 1.0),
        (1e16, "10^{16}", 1.0),
        (1e16, "10^{15}", 0.0),
        (0.1, "\\frac{1}{10}", 1.0),
        (0.1 + 0.2, "0.3", 1.0),
        (1 / 3, "\\frac{1}{3}", 1.0),
        (1 / 3, "0.3", 0.0),
        (2.5, "2\\frac{1}{2}", 1.0),
        (3.14, "\\pi", 0.0),
        (-2.0, "-2", 1.0),
        (-0.0, "0", 1.0),
        (1e308, "10^{308}", 1.0),
        (5e-324, "0", 0.0),
        (18.0, "18 \\text{ dollars}", 1.0),
        (18, "18.0", 1.0),
        (0, "0", 1.0),
        (Decimal("1E-7"), "0.0000001", 1.0),
        (Decimal("0.10"), "0.1", 1.0),
        (Decimal("0.1"), "0.1000000000000001", 0.0),
        (Fraction(1, 3), "\\frac{2}{6}", 1.0),
        (Fraction(1, 3), "0.33", 0.0),
        ("1e-3", "0.001", 1.0),
        ("1E-3", "0.001", 1.0),
        ("-1.5e3", "-1500", 1.0),
        ("1.2e-5", "1.2\\times10^{-5}", 1.0),
        ("3E8", "3\\times10^8", 1.0),
        ("1e400", "10^{400}", 1.0),
        ("1e400", "10^{401}", 0.0),
        ("1e999999999", "10^{999999999}", 1.0),
        ("1e999999999", "1", 0.0),
        ("1e-999999999", "0", 0.0),
        ("The work.\n#### 1,234", "1234", 1.0),
        ("$18$", "18", 1.0),
        ("\\boxed{18}", "18", 1.0),
    ],
)
def test_math_when_gold_is_of_any_type_then_its_value_decides(answer, text, reward):
    assert math_reward(f"\\boxed{{{text}}}", answer) == reward


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), -float("inf"), Decimal("nan")])
def test_math_when_gold_is_not_finite_then_one_line_says_so(answer):
    with pytest.raises(InvalidInput, match=r"^answer .*: expected text or a finite number$"):
        math_reward("\\boxed{1}", answer)


@settings(deadline=None)
@given(st.integers(4000, 20_000), st.integers(1, 9))
def test_math_when_integers_are_longer_than_python_prints_then_compared_exactly(digits, first):
    number, text = first * 10**digits + 7, f"{first}{'0' * (digits - 1)}7"
    assert math_reward(f"\\boxed{{{text}}}", number) == 1.0
    assert math_reward(f"\\boxed{{{text[:-1]}8}}", number) == 0.0
    assert math_reward(f"\\boxed{{{text}}}", text) == 1.0


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(FINITE)
def test_math_when_gold_is_a_float_then_its_decimal_and_scientific_spellings_are_right(value):
    exact = Decimal(repr(value))
    digits, _, power = f"{exact:e}".partition("e")
    for text in (f"{exact:f}", repr(value), f"{digits} \\times 10^{{{int(power)}}}"):
        assert math_reward(f"\\boxed{{{text}}}", value) == 1.0
        assert math_reward(f"#### {text}", value) == 1.0


@settings(deadline=None)
@given(FINITE, FINITE)
def test_math_when_two_floats_differ_then_wrong(value, other):
    near = abs(value - other) <= 1e-9 * max(abs(value), abs(other))
    if not near:
        assert math_reward(f"\\boxed{{{Decimal(repr(other)):f}}}", value) == 0.0


@settings(deadline=None)
@given(
    st.integers(1, 10**15),
    st.sampled_from([",", "{,}", "\\,", " ", "'", "\u202f", "\\ ", "\u2019"]),
    st.sampled_from(
        ["{}", "${}", "{} dollars", "{}\\text{{ km}}", "\\text{{{}}}", "x = {}", "**{}**"]
    ),
    st.sampled_from(
        ["\\boxed{{{}}}", "\\boxed {{{}}}", "\\fbox{{{}}}", "#### {}", "The answer is {}."]
    ),
)
def test_math_when_a_number_has_separators_units_and_any_place_then_right(
    number, mark, form, place
):
    text = place.format(form.format(f"{number:,}".replace(",", mark)))
    assert math_reward(text, number) == 1.0
    assert math_reward(text, number + 1) == 0.0


@settings(deadline=None)
@given(st.integers(1, 999), st.integers(100, 999))
def test_math_when_a_tuple_looks_like_thousands_then_it_is_not_joined(first, second):
    joined = str(1000 * first + second)
    for pair in (f"({first},{second})", f"{first}, {second}", f"\\{{{first},{second}\\}}"):
        assert math_reward(f"\\boxed{{{joined}}}", pair) == 0.0
        assert math_reward(f"\\boxed{{{pair}}}", joined) == 0.0
        assert math_reward(f"\\boxed{{{pair}}}", pair) == 1.0


@settings(deadline=None)
@given(st.fractions(), st.fractions())
def test_math_when_two_fractions_are_compared_then_exactly(left, right):
    text = f"\\boxed{{\\frac{{{left.numerator}}}{{{left.denominator}}}}}"
    assert math_reward(text, left) == 1.0
    assert math_reward(text, right) == float(left == right)


@settings(deadline=None)
@given(st.text(max_size=200), st.sampled_from(["18", "x+1", "(1,2)", "yes", "\\frac{1}{2}"]))
def test_math_when_text_is_random_then_it_never_raises(text, gold):
    for form in (text, f"\\boxed{{{text}}}", f"#### {text}"):
        assert math_reward(form, gold) in (0.0, 1.0)
