"""Micro-batches whatever the sequences: within the budget, as many as asked, each sequence once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_torch.algorithms import packing


def batch_of(lengths, groups):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return {"cu_seqlens": starts.to(torch.int32), "group_index": torch.tensor(groups)}


@st.composite
def batches(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    lengths = draw(st.lists(st.integers(1, 60), min_size=len(groups), max_size=len(groups)))
    return lengths, groups


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 200), st.integers(1, 40))
def test_split_micro_batches_when_more_are_asked_then_budget_count_and_sequences_hold(
    drawn, budget, minimum
):
    lengths, groups = drawn
    batch = batch_of(lengths, groups)
    split = packing.split_micro_batches(batch, budget, minimum)
    assert sorted(i for part in split for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in split)
    assert all(sum(lengths[i] for i in part) <= budget or len(part) == 1 for part in split)
    least = len(packing.split_micro_batches(batch, budget))
    # Not one more than asked: ranks agree on a number by asking for it.
    assert len(split) == max(least, min(minimum, len(lengths)))


@pytest.mark.parametrize("minimum", range(1, 18))
def test_split_micro_batches_when_another_rank_needs_more_then_none_grows(minimum):
    """7 bins of at most 40 do; dealt again, longest first, the 8 have up to 41."""
    lengths = [11, 12, 13, 13, 14, 14, 14, 14, 15, 16, 16, 17, 17, 17, 18, 18, 19]
    split = packing.split_micro_batches(batch_of(lengths, list(range(17))), 40, minimum)
    assert max(sum(lengths[i] for i in part) for part in split) <= 40
    assert len(split) == max(7, minimum)


def test_split_micro_batches_when_split_further_then_groups_stay_together_where_they_can():
    batch = batch_of([10] * 12, [i // 4 for i in range(12)])
    split = packing.split_micro_batches(batch, 120, 4)
    whole = [part for part in split if len({i // 4 for i in part}) == 1 and len(part) == 4]
    assert len(split) == 4
    assert len(whole) == 2
