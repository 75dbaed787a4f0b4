"""Numbers with words: fractions in words are fractions, and what a word changes is no number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.rewards.math import math_reward


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("5/6", "\\boxed{five sixths}"),
        ("5/6", "\\boxed{5\\text{ sixths}}"),
        ("-5/6", "\\boxed{-5\\text{ sixths}}"),
        ("five sixths", "\\boxed{\\frac56}"),
        ("1/6", "\\boxed{\\text{one sixth}}"),
        ("1/3", "\\boxed{one-third}"),
        ("2/3", "\\boxed{Two-thirds}"),
        ("1/2", "\\boxed{one half}"),
        ("3/16", "\\boxed{3\\text{ sixteenths of an inch}}"),
        ("0.005", "\\boxed{5\\text{ thousandths}}"),
        ("21/100", "\\boxed{twenty-one hundredths}"),
        ("7/20", "\\boxed{seven twentieths}"),
        ("5/6", "The answer is five sixths."),
        ("1/9", "So the answer is one ninth of the total."),
        ("5/6", "So she ate 5 sixths of the cake."),
        ("1/3", "She wins 1 third of the games that she plays."),
        ("5/7", "#### five sevenths"),
        ("5000000", "So the company earned 5 million dollars."),
    ],
)
def test_math_when_a_fraction_is_in_words_then_it_is_that_fraction(gold, text):
    assert math_reward(text, gold) == 1.0
    assert [math_reward(text, number) for number in (1, 2, 3, 5, 6, 7, 21)] == [0.0] * 7


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("5", "5 sixth"),
        ("3", "3 tenth"),
        ("5", "5 and a half"),
        ("1", "one hundredth"),
        ("20", "twenty third"),
        ("5/6", "5 sixth"),
    ],
)
def test_math_when_words_are_no_clear_fraction_then_wrong(gold, text):
    assert math_reward(f"\\boxed{{{text}}}", gold) == 0.0


ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12, "thirteenth": 13}
PARTS |= {"fifteenth": 15, "nineteenth": 19, "thirtieth": 30, "ninetieth": 90, "hundredth": 100}


@settings(deadline=None)
@given(
    st.integers(1, len(ONES)),
    st.sampled_from(sorted(PARTS)),
    st.sampled_from(["\\boxed{{{}}}", "\\boxed{{\\text{{{}}}}}", "#### {}", "The answer is {}."]),
    st.booleans(),
)
def test_math_when_words_are_a_fraction_in_any_place_then_its_value_decides(
    above, part, place, digits
):
    plural = part if above == 1 else "halves" if part == "half" else f"{part}s"
    text = place.format(f"{above if digits else ONES[above - 1]} {plural}")
    assert math_reward(text, f"{above}/{PARTS[part]}") == 1.0
    assert math_reward(text, f"{above}/{PARTS[part] + 1}") == 0.0
    assert math_reward(text, above) == 0.0
