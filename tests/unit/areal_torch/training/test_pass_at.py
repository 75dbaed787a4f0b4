"""pass@k: what the best of k answers earns, by formula and by trying all draws."""

from __future__ import annotations

from itertools import combinations
from math import comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_torch.training.pass_at import best_of, pass_at

REWARDS = st.lists(st.floats(-100, 100), min_size=1, max_size=7)


@given(REWARDS, st.data())
def test_best_when_all_draws_are_tried_then_the_same(rewards: list[float], data) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    tried = fmean(max(draw) for draw in combinations(rewards, k))
    assert best_of(rewards, k) == pytest.approx(tried, abs=1e-9)


@given(st.integers(1, 300), st.data())
def test_best_when_rewards_are_0_and_1_then_the_estimate_of_pass_at_k(n: int, data) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    rewards = [1.0] * right + [0.0] * (n - right)
    assert best_of(rewards, k) == pytest.approx(1 - comb(n - right, k) / comb(n, k))


@pytest.mark.parametrize(
    ("counts", "ks"),
    [([], []), ([1], []), ([0], []), ([2], ["2"]), ([4, 0, 5], ["2", "4"]), ([6], ["2", "4", "6"])],
)
def test_pass_at_when_rows_have_some_answers_then_k_is_at_most_the_fewest(counts, ks) -> None:
    assert list(pass_at([[1.0] * count for count in counts])) == ks


def test_pass_at_when_a_row_has_no_answer_then_it_counts_as_0() -> None:
    assert pass_at([[0.0, 1.0], []]) == {"2": 0.5}
