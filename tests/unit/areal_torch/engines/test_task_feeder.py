"""Rows on their way into the ledger: how many are queued, and what a full ledger holds back."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from areal.config.experiment import GRPOConfig
from areal.errors import CapacityExceeded
from areal.types import TaskState, WorkflowSpec
from areal_torch.engines.task_feeder import RowSupply, TaskFeeder

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


class Rows:
    """A loader that ends."""

    def __init__(self, count: int) -> None:
        self._items = [(0, index, {"n": index}) for index in range(count)]

    def __iter__(self):
        return iter(self._items)

    def seek(self, epoch: int, cursor: int) -> None:
        self._items = self._items[cursor:]


class Session:
    """A trainer's session, and its ledger, in a dict: task id -> (state, step)."""

    def __init__(self, cursor: list[int] | None = None) -> None:
        self.config = GRPOConfig()
        self.config.train_dataset.batch_size = 2
        self.config.rollout.max_head_offpolicyness = 0
        self.resumed = SimpleNamespace(extra={"dataset": cursor}) if cursor else None
        self.ledger = self
        self.checkpoint_extra = {}
        self.step = 0
        self.full = False
        self.tasks = {}
        self.calls = []

    def on_rank0(self, function):
        return function()

    def submit(self, tasks, *, seal=False):
        self.calls.append(([task.task_id for task in tasks], seal))
        if self.full:
            raise CapacityExceeded("the ledger is full; try again in 1 s")
        fresh = {task.task_id: (TaskState.QUEUED, 0) for task in tasks}.items() - self.tasks.items()
        self.tasks |= dict(fresh)
        return len(fresh)

    def states(self, task_ids):
        return {task_id: self.tasks[task_id] for task_id in task_ids}

    def train_counts(self):
        counts = Counter(state for state, _ in self.tasks.values())
        return {state: counts[state] for state in TaskState}

    def end(self, *task_ids: str, step: int = 0) -> None:
        state = TaskState.BATCHED if step else TaskState.REJECTED
        self.tasks |= dict.fromkeys(task_ids, (state, step))


SPEC = WorkflowSpec("rlvr")


def test_refill_when_the_rows_end_then_the_last_submission_seals_and_no_wait_asks_for_more():
    session = Session()
    feeder = TaskFeeder(session, Rows(5))
    feeder.refill(SPEC)
    assert session.calls == [(["e0-0", "e0-1", "e0-2", "e0-3"], False)]
    assert feeder.refill_below == 2
    session.end("e0-0", "e0-1", step=1)
    feeder.refill(SPEC)
    assert session.calls[1:] == [(["e0-4"], True)]
    assert feeder.refill_below == 0
    feeder.refill(SPEC)
    assert len(session.calls) == 2


def test_refill_when_the_ledger_is_full_then_the_same_rows_are_offered_first_and_none_is_skipped():
    session = Session()
    session.full = True
    feeder = TaskFeeder(session, Rows(8))
    feeder.refill(SPEC)
    assert [task.task_id for task in feeder.held_back] == ["e0-0", "e0-1", "e0-2", "e0-3"]
    assert feeder.refill_below == 0
    assert session.checkpoint_extra["dataset"]() == [0, 0]
    session.full = False
    feeder.refill_if_low(SPEC, queued=0)
    assert feeder.held_back is None
    assert sorted(session.tasks) == ["e0-0", "e0-1", "e0-2", "e0-3"]
    assert session.calls[0] == session.calls[1]


def test_refill_when_only_the_seal_is_refused_then_it_is_sent_again():
    session = Session()
    feeder = TaskFeeder(session, Rows(4))
    feeder.refill(SPEC)
    session.end("e0-0", "e0-1", step=1)
    session.full = True
    feeder.refill(SPEC)
    assert session.calls[1:] == [([], True)]
    assert feeder.held_back == []
    session.full = False
    feeder.refill_if_low(SPEC, queued=0)
    assert session.calls[2:] == [([], True)]
    assert feeder.held_back is None


def test_cursor_when_later_rows_end_first_then_it_stays_at_the_oldest_open_one():
    session = Session()
    feeder = TaskFeeder(session, Rows(8))
    feeder.refill(SPEC)
    session.end("e0-1")
    assert feeder.cursor() == [0, 0]
    session.end("e0-0", step=1)
    assert feeder.cursor() == [0, 0]  # its step has not ended: a resume may need it
    session.step = 1
    assert feeder.cursor() == [0, 2]
    session.end("e0-2", "e0-3")
    assert feeder.cursor() == [0, 4]


def test_cursor_when_resumed_then_rows_continue_there():
    session = Session(cursor=[0, 3])
    feeder = TaskFeeder(session, Rows(8))
    assert feeder.cursor() == [0, 3]
    feeder.refill(SPEC)
    assert session.calls == [(["e0-3", "e0-4", "e0-5", "e0-6"], False)]
