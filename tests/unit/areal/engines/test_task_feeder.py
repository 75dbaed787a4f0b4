"""How many rows a trainer keeps queued, from what the ledger has counted."""

from __future__ import annotations

import pytest

from areal.engines.task_feeder import RowSupply
from areal.types import TaskState

BATCH, ETA = 8, 2
AHEAD = (ETA + 1) * BATCH


def supply_after(*rounds: tuple[int, int]) -> RowSupply:
    """After rounds of (accepted, rejected) tasks."""
    supply, trained, rejected = RowSupply(BATCH, ETA), 0, 0
    for accepted, dropped in rounds:
        trained, rejected = trained + accepted, rejected + dropped
        supply.observe({TaskState.TRAINED: trained, TaskState.REJECTED: rejected})
    return supply


def test_target_when_nothing_is_known_or_all_is_accepted_then_one_batch_above_the_bound() -> None:
    for supply in (supply_after(), supply_after((BATCH, 0)), supply_after(*[(BATCH, 0)] * 50)):
        assert (supply.watermark, supply.target) == (AHEAD, AHEAD + BATCH)


def test_target_when_one_in_ten_is_accepted_then_ten_rows_a_group() -> None:
    supply = supply_after(*[(BATCH, 9 * BATCH)] * 5)
    assert supply.acceptance == pytest.approx(0.1, rel=0.15)
    assert supply.watermark == pytest.approx(10 * AHEAD, rel=0.15)
    assert supply.target == supply.watermark + BATCH


def test_target_when_nothing_is_accepted_then_it_is_bounded() -> None:
    assert supply_after(*[(0, 100)] * 50).target == 20 * AHEAD + BATCH


def test_acceptance_when_it_changes_then_the_window_forgets_what_was_before() -> None:
    hard = [(1, 9)] * 100
    assert supply_after(*hard, *[(BATCH, 0)] * 5).acceptance == 1.0
    assert supply_after(*[(BATCH, 0)] * 100, *hard).acceptance < 0.15


def test_acceptance_when_a_run_is_resumed_then_that_of_the_trial_so_far() -> None:
    assert supply_after((100, 900)).acceptance == pytest.approx(0.1, rel=0.05)


def test_acceptance_when_counted_back_then_it_stays_between_zero_and_one() -> None:
    supply = RowSupply(BATCH, ETA)
    supply.observe({TaskState.COMPLETED: 100, TaskState.DEAD_LETTERED: 40})
    supply.observe({TaskState.COMPLETED: 10, TaskState.DEAD_LETTERED: 0})  # made again, retried
    assert 0 < supply.acceptance <= 1
    supply.observe({TaskState.CANCELLED: 500, TaskState.COMPLETED: 10})  # by a finished run
    assert 0 < supply.acceptance <= 1
