"""Micro-batches and ranks are balanced by what sequences cost, within the token budget."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal_torch.algorithms.test_packing_budget import batch_of, batches

from areal_torch.algorithms import packing


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 200), st.integers(1, 40), st.floats(0, 2))
def test_split_micro_batches_when_pairs_cost_then_the_budget_holds(drawn, budget, minimum, pair):
    lengths, groups = drawn
    batch = batch_of(lengths, groups)
    split = packing.split_micro_batches(batch, budget, minimum, pair)
    assert sorted(i for part in split for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= budget or len(part) == 1 for part in split)
    assert len(split) == len(packing.split_micro_batches(batch, budget, minimum))
    costs = [packing.cost([lengths[i] for i in part], pair) for part in split]
    assert costs == sorted(costs, reverse=True)


def test_split_micro_batches_when_pairs_cost_then_long_sequences_are_spread():
    lengths = [16, 16, 4, 4, 4, 4, 4, 4, 4, 4]
    batch = batch_of(lengths, list(range(10)))
    split = packing.split_micro_batches(batch, 40, pair_cost=1.0)
    assert [[lengths[i] for i in part].count(16) for part in split] == [1, 1]


def test_assign_groups_when_pairs_cost_then_one_long_equals_many_short():
    """16 x 16 pairs of one sequence weigh as much as 16 sequences of 4 x 4."""
    costs = [packing.cost([n], 100.0) for n in [16, *[4] * 16]]
    first, second = packing.assign_groups(costs, 2)
    assert sorted([len(first), len(second)]) == [1, 16]
