"""Factors without a sign between them: numbers after other factors, letters after a space."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.rewards.math import math_reward


def scores(gold: str, text: str) -> bool:
    return math_reward(f"\\boxed{{{text}}}", gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("(n+1)2^n", "2^n(n+1)"),
        ("(n+1)2^n", "(n+1)\\cdot 2^n"),
        ("n2^{n-1}", "n\\cdot2^{n-1}"),
        ("3360", "\\frac{8!}{2!3!}"),
        ("72", "2^3 3^2"),
        ("8064", "\\binom{10}{5}2^5"),
        ("2^{100}", "2^{50}2^{50}"),
        ("k!2^k", "2^k k!"),
        ("2\\sqrt{3}", "\\sqrt{3}2"),
        ("2\\sin x", "\\sin(x)2"),
        ("\\frac{7}{2}", "3 1/2"),
    ],
)
def test_math_when_a_number_is_not_the_first_factor_then_it_is_one(gold, text):
    assert scores(gold, text)
    assert not scores(gold, f"{text}+1")


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("6", "2 3"),
        ("6", "(2)3"),
        ("18", "3 3 2"),
        ("\\frac{3}{2}", "1/2 3"),
        ("\\frac{1}{4}", "1/2 0.5"),
        ("0.15", "5\\% 3"),
        ("450", "30^\\circ 15"),
        ("\\sin 6", "\\sin 2 3"),
        ("3a", "a1+a2"),
        ("2x", "x2"),
        ("6e", "2e3"),
    ],
)
def test_math_when_a_number_may_be_of_a_list_or_an_index_then_it_is_no_factor(gold, text):
    assert not scores(gold, text)


FACTORS = ("2^n", "3^{n}", "(n+1)", "n!", "\\sqrt{5}", "\\frac{n}{3}", "\\binom{n}{2}", "x^{2}")


@settings(deadline=None)
@given(st.permutations(FACTORS), st.integers(1, len(FACTORS)), st.sampled_from(["", " ", "\\,"]))
def test_math_when_factors_are_in_any_order_then_the_product_is_the_same(factors, count, mark):
    factors = factors[:count]
    gold = " \\cdot ".join(sorted(factors))
    assert scores(gold, mark.join(factors))
    assert not scores(gold, mark.join([*factors, "(n+2)"]))


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("\\sqrt{a}", "\\sqrt a"),
        ("\\ln{a}", "\\ln a"),
        ("\\sin{A}", "\\sin A"),
        ("\\frac{a\\sqrt3}{2}", "\\frac{\\sqrt{3}}{2} a"),
        ("\\frac{s^2\\sqrt3}{4}", "\\frac{\\sqrt{3}}{4} s^2"),
        ("\\frac{L}{3}", "\\frac{1}{3} L"),
        ("\\frac{1}{h}", "1/h"),
        ("\\frac{ab}{cd}", "(ab)/(cd)"),
        ("m+m", "2 m"),
        ("a^2", "a a"),
    ],
)
def test_math_when_a_letter_is_a_variable_on_one_side_then_on_both(gold, text):
    assert scores(gold, text)
    assert scores(text, gold)
    assert not scores(gold, f"{text} + 1")


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("2\\pi", "2\\pi h"),
        ("2\\pi", "2\\pi L/g"),
        ("\\sqrt{2}", "\\sqrt 2 a"),
        ("\\frac{1}{2}", "\\frac12 a"),
        ("\\frac{1}{2}", "\\frac12 a h"),
        ("3", "3 V"),
        ("4", "4 a h"),
        ("2", "2\\frac{L}{g}"),
        ("1", "1/h"),
        ("a", "a a"),
        ("a", "a(bc)"),
        ("x^2", "x^2 (y)"),
        ("\\frac{ab}{cd}", "\\frac{abd}{c}"),
    ],
)
def test_math_when_a_letter_is_a_variable_then_it_is_no_unit(gold, text):
    assert not scores(gold, text)
    assert not scores(text, gold)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("5", "5 m"),
        ("3", "x = 3 s"),
        ("10", "10 L"),
        ("1200", "1,200 m"),
        ("3e8", "3 \\times 10^8 m/s"),
        ("9.8", "9.8 m s^{-2}"),
        ("5\\text{ m}", "5 m"),
        ("5 m", "5\\text{ m}"),
        ("20 m^2", "20"),
        ("3", "3\\text{ V}"),
        ("9.8", "9.8 \\frac{\\text{m}}{\\text{s}^2}"),
    ],
)
def test_math_when_a_letter_after_digits_is_a_unit_then_the_number_counts(gold, text):
    assert scores(gold, text)
    assert not scores("7", text)


VARIABLES = st.lists(st.sampled_from("abcghkmnprstvwxyACFKLNRSV"), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.sampled_from(["\\frac{1}{2}", "\\sqrt{3}", "2\\pi", "\\frac{n}{3}"]), VARIABLES)
def test_math_when_variables_follow_in_any_order_then_spaces_do_not_matter(first, letters):
    gold, text = first + " \\cdot ".join(["", *letters]), " ".join([first, *letters[::-1]])
    assert scores(gold, text)
    assert scores(text, gold)
    assert not scores(first, text)
    assert not scores(text, first)
