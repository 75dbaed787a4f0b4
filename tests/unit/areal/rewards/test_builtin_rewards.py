"""The reward functions that ship: exact answers, forms of answers, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import InvalidInput
from areal.rewards import BUILTIN, builtin_reward
from areal.rewards.boxed import last_boxed
from areal.rewards.math import math_reward
from areal.rewards.multiple_choice import multiple_choice_reward
from areal.rewards.regex import regex_reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("80", "80", 1.0),
        (" 80.\n", "80", 1.0),
        ("81", "80", 0.0),
        ("80.0", 80, 1.0),
        ("1,234", "1234", 1.0),
        ("1,2", "12", 0.0),
        ("$5", "5", 1.0),
        ("first \\boxed{6}, then \\boxed{5}", "5", 1.0),
        ("first \\boxed{5}, then \\boxed{6}", "5", 0.0),
        ("2 + 3 = 5\n#### 5", "5", 1.0),
        ("5 apples\n#### 6", "5", 0.0),
        ("\\boxed{\\frac{2}{4}}", "0.5", 1.0),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{x^2+2x}", "(x+1)^2", 0.0),
        ("The answer is 3/4", "$\\frac{3}{4}$", 1.0),
        ("\\boxed{\\text{East}}", "East", 1.0),
        ("\\boxed{West}", "East", 0.0),
        ("", "5", 0.0),
        ("\\boxed{", "5", 0.0),
    ],
)
def test_math_when_answer_has_some_form_then_value_decides(completion, answer, reward):
    assert math_reward(completion, answer) == reward


def test_math_when_text_is_equal_then_sympy_is_not_asked(monkeypatch):
    monkeypatch.setattr("areal.rewards.math_same.parse", lambda *_: pytest.fail("slow path taken"))
    assert math_reward("\\boxed{42}", "42") == 1.0
    assert math_reward("\\boxed{41}", "42") == 0.0


@pytest.mark.parametrize("answer", ["", "  ", None, True, ["5"]])
def test_math_when_answer_is_not_one_then_it_says_so(answer):
    with pytest.raises(InvalidInput, match="answer"):
        math_reward("5", answer)


@given(st.integers(-(10**12), 10**12))
def test_math_when_a_number_is_written_in_several_ways_then_all_are_right(number):
    for text in (str(number), f"{number:,}", f"\\boxed{{{number}}}", f"so\n#### {number:,}"):
        assert math_reward(text, str(number)) == 1.0


@given(st.text(alphabet="ab{} ", max_size=30))
def test_last_boxed_when_braces_balance_then_content_comes_back(inner):
    depth = 0
    balanced = True
    for character in inner:
        depth += {"{": 1, "}": -1}.get(character, 0)
        balanced = balanced and depth >= 0
    if balanced and depth == 0:
        assert last_boxed(f"x \\boxed{{{inner}}} y") == (inner if inner.strip() else "")
    else:
        last_boxed(f"x \\boxed{{{inner}}} y")  # must only not raise


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("A is wrong, so the answer is (B).", "B", 1.0),
        ("A is wrong, so the answer is (B).", "A", 0.0),
        ("Answer: **c**", "C", 1.0),
        ("b", "B", 1.0),
        ("the answer a student gave was wrong. D", "D", 1.0),
        ("\\boxed{\\text{D}}", "D", 1.0),
        ("The answer is B, no: the answer is C", "C", 1.0),
        ("no idea", "A", 0.0),
        ("B", 1, 1.0),
    ],
)
def test_multiple_choice_when_completion_settles_then_its_letter_counts(completion, answer, reward):
    assert multiple_choice_reward(completion, answer, choices=["w", "x", "y", "z"]) == reward


@pytest.mark.parametrize("answer", ["E", 4, "AB", -1, True, None])
def test_multiple_choice_when_answer_is_no_option_then_it_says_so(answer):
    with pytest.raises(InvalidInput, match="answer"):
        multiple_choice_reward("A", answer, choices=["w", "x", "y", "z"])


def test_regex_when_pattern_matches_then_one():
    assert regex_reward("<answer>42</answer> ok", r"<answer>\d+</answer>") == 1.0
    assert regex_reward("<answer>42</answer> ok", r"<answer>\d+</answer>", fullmatch=True) == 0.0
    assert regex_reward("none", r"<answer>\d+</answer>") == 0.0


def test_regex_when_group_answer_exists_then_it_must_equal_the_row():
    pattern = r"<answer>(?P<answer>.*?)</answer>"
    assert regex_reward("<answer> 42 </answer>", pattern, answer="42") == 1.0
    assert regex_reward("<answer>41</answer>", pattern, answer="42") == 0.0
    with pytest.raises(InvalidInput, match="no field 'answer'"):
        regex_reward("<answer>41</answer>", pattern)


def test_regex_when_pattern_is_malformed_then_it_says_so():
    with pytest.raises(InvalidInput, match=r"pattern '\(a': not a regular expression"):
        regex_reward("a", "(a")


def test_builtin_when_name_is_mistyped_then_nearest_is_named():
    assert all(callable(builtin_reward(name)) for name in BUILTIN)
    with pytest.raises(InvalidInput, match="did you mean 'math'"):
        builtin_reward("maths")
