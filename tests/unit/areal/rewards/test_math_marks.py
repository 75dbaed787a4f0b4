"""Spaces, punctuation and marks beside an answer do not change it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from areal.rewards.math import math_reward

ANSWERS = ("42", "(2,3)", "x^2+1", "\\frac{1}{2}", "\\{1,2\\}", "5!", "\\text{even}", "[0,1)")
WRONG = ("41", "(3,2)", "x^2+2", "\\frac{1}{3}", "\\{1,3\\}", "5", "\\text{odd}", "[0,1]")
SPACES = ("\\,", "\\:", "\\;", "\\!", "\\ ", "\\quad", "\\qquad", "~", " ", ".", ",", "\\\\")
PLACES = ("\\boxed{{{}}}", "The answer is ${}$.", "#### {}", "$$\\boxed{{{}}}$$")


@settings(deadline=None)
@given(
    st.integers(0, len(ANSWERS) - 1),
    st.lists(st.sampled_from(SPACES), min_size=1, max_size=3).filter(lambda m: m != ["."] * 3),
    st.sampled_from(PLACES),
)
def test_math_when_spaces_and_punctuation_follow_then_the_answer_is_the_same(index, marks, place):
    text = place.format(ANSWERS[index] + "".join(marks))
    assert math_reward(text, ANSWERS[index]) == 1.0
    assert math_reward(text, WRONG[index]) == 0.0
    assert math_reward(place.format(ANSWERS[index]), ANSWERS[index] + marks[0]) == 1.0
