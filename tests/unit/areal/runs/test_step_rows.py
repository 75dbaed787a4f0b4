"""Rows of a long run stay in bounded memory, and keep its beginning, its end and its shape."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from areal.runs.status import TrainerStatus
from areal.runs.step_rows import MOST_ROWS, thin


@given(st.integers(0, 400), st.integers(1, 60), st.integers(1, 30))
def test_rows_when_they_come_in_any_portions_then_bounded_in_order_and_with_both_ends(
    steps: int, most: int, portion: int
) -> None:
    rows: list[dict[str, int]] = []
    for first in range(0, steps, portion):
        rows += [{"step": step} for step in range(first, min(steps, first + portion))]
        thin(rows, most)
        assert len(rows) <= most
    kept = [row["step"] for row in rows]
    ends = most // 4
    assert all(a < b for a, b in pairwise(kept))
    assert kept[:ends] == list(range(min(ends, steps)))
    assert kept[max(0, len(kept) - ends) :] == list(range(max(0, steps - ends), steps))
    if steps <= most:
        assert kept == list(range(steps))


def test_status_when_a_run_is_long_then_its_rows_are_bounded_and_a_follower_misses_none() -> None:
    status = TrainerStatus(total_steps=10_000, world_size=1)
    seen: list[int] = []
    for step in range(1, 10_001):
        status.finished_step(step, {"step": step})
        if step % 100 == 0:  # a follower asks now and then
            seen += [row["step"] for row in status.snapshot(seen[-1] if seen else 0).rows]
    assert seen == list(range(1, 10_001))
    assert len(status.snapshot(0).rows) <= MOST_ROWS
    status.opened(2, 10_000, [{"step": step} for step in range(1, 10_001)])
    assert len(status.snapshot(0).rows) <= MOST_ROWS
