import itertools

from hypothesis import given
from hypothesis import strategies as st

from areal.weights.broadcast import runs

sizes = st.lists(st.integers(0, 60), max_size=40)


@given(sizes, st.integers(1, 100))
def test_runs_when_split_then_keep_order_and_bound_and_are_as_few_as_that_allows(items, most):
    found = list(runs(items, lambda size: size, most))
    assert [size for run in found for size in run] == items
    assert all(found)
    for run in found:
        assert sum(run) <= most or len(run) == 1
    for run, after in itertools.pairwise(found):
        assert sum(run) + after[0] > most
