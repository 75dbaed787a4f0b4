"""Submits rows to the ledger ahead of the trainer, on rank 0.

    rows ── draw ──> tasks ── submit ──> open ── ended ──> forgotten
      |                |  ^
      | none left      v  | a later poll
    sealed           held back: the ledger is full

A checkpoint's cursor is the oldest row that is open or held back; a resume begins there. Enough
rows are submitted to keep the workers busy while the trainer trains; see `RowSupply`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from areal import errors
from areal.chassis.logging import get_logger
from areal.types import LIVE_STATES, Purpose, Task, TaskState, WorkflowSpec
from areal_torch.training.session import TrainerSession

# The rate covers as many ended tasks as this many batches have.
_WINDOW_BATCHES = 4
# Rows are queued for a rate of at least this; below it, refills within a batch do the rest.
_LEAST_ACCEPTANCE = 0.05
_ACCEPTED = (TaskState.COMPLETED, TaskState.BATCHED, TaskState.TRAINED)
_DROPPED = (TaskState.REJECTED, TaskState.DEAD_LETTERED, TaskState.EXPIRED)


class RowLoader(Protocol):
    """A resumable source of rows (`areal.datasets.loader.StatefulLoader`)."""

    def __iter__(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]: ...

    def seek(self, epoch: int, cursor: int) -> None:
        """Makes (epoch, cursor) the next item."""
        ...


class TaskFeeder:
    """Submits the rows of one loader; all methods but `cursor` are for rank 0."""

    def __init__(self, session: TrainerSession, rows: RowLoader) -> None:
        """Continues at the checkpoint's position; ids submitted after it are known (L6)."""
        config = session.config
        self._session = session
        self._batch_size = config.train_dataset.batch_size
        # Messages stay as large as where every row is accepted.
        self._most = (config.rollout.max_head_offpolicyness + 2) * self._batch_size
        self._supply = RowSupply(self._batch_size, config.rollout.max_head_offpolicyness)
        self._next: list[int] | None = None
        if session.resumed is not None and (cursor := session.resumed.extra.get("dataset")):
            rows.seek(*cursor)
            self._next = list(cursor)
        session.checkpoint_extra["dataset"] = self.cursor
        self._rows = iter(rows)
        self._sealed = False
        self.held_back: list[Task] | None = None
        """Rows that were drawn, and then refused because the ledger was full."""
        # (epoch, index, task_id) of what was submitted and may not have ended, oldest first.
        self._open: deque[tuple[int, int, str]] = deque()
        self._log = get_logger(__name__)

    @property
    def refill_below(self) -> int:
        """Number of queued rows below which a wait for a batch should end; 0: never."""
        return 0 if self._sealed or self.held_back is not None else self._supply.watermark

    def refill(self, spec: WorkflowSpec) -> None:
        """Submits rows until enough are queued; ids seen before do not count (L6)."""
        counts = self._session.ledger.train_counts()
        self._supply.observe(counts)
        missing = self._supply.target - counts[TaskState.QUEUED]
        while missing > 0 and (self.held_back is not None or not self._sealed):
            tasks = self.held_back or self._draw(spec, min(missing, self._most))
            try:
                accepted = self._session.ledger.submit(tasks, seal=self._sealed)
            except errors.CapacityExceeded as error:
                # Then it has enough to do: these go with a later poll, which has the deadline.
                if self.held_back is None:
                    self._log.warning("submission_held_back", tasks=len(tasks), cause=str(error))
                self.held_back = tasks
                self._next = list(tasks[0].position or ()) if tasks else self._next
                return
            self.held_back = None
            for task in tasks:
                epoch, index = task.position or (0, 0)
                self._open.append((epoch, index, task.task_id))
                self._next = [epoch, index + 1]
            missing -= accepted

    def refill_if_low(self, spec: WorkflowSpec, queued: int) -> None:
        """Refills if that many queued rows are too few."""
        enough = self._batch_size if self.held_back is not None else self._supply.watermark
        if queued < enough:
            self.refill(spec)

    def cursor(self) -> list[int] | None:
        """Returns the lowest (epoch, index) that has not ended or was not submitted; collective."""
        return self._session.on_rank0(self._oldest_open)

    def _oldest_open(self) -> list[int] | None:
        session = self._session
        while self._open:
            head = list(itertools.islice(self._open, 500))
            states = session.ledger.states([task_id for _, _, task_id in head])
            for epoch, index, task_id in head:
                state, step = states.get(task_id, (None, 0))
                if state in LIVE_STATES and not 0 < step <= session.step:
                    return [epoch, index]
                self._open.popleft()
        return self._next

    def _draw(self, spec: WorkflowSpec, count: int) -> list[Task]:
        """The next rows as tasks; fewer than asked, and sealed, when the rows end."""
        tasks = [
            Task(
                task_id=f"e{epoch}-{index}",
                purpose=Purpose.TRAIN,
                workflow=spec,
                data=dict(row),
                position=(epoch, index),
            )
            for epoch, index, row in itertools.islice(self._rows, count)
        ]
        self._sealed = len(tasks) < count
        return tasks


class RowSupply:
    """The number of rows to keep queued, from the ledger's own counters.

    While the trainer trains it submits nothing, and groups for (eta + 1) batches may be made (L4).
    If the workflow rejects rows, each group costs 1 / acceptance rows.
    """

    def __init__(self, batch_size: int, max_head_offpolicyness: int) -> None:
        """Starts with an acceptance of 1.

        Args:
            batch_size: Groups per train step (B).
            max_head_offpolicyness: The staleness bound (eta).
        """
        self._batch_size = batch_size
        self._ahead = (max_head_offpolicyness + 1) * batch_size
        # (accepted, ended) in the trial when the ledger was asked; the newest last.
        self._seen: deque[tuple[int, int]] = deque([(0, 0)])

    def observe(self, train_counts: Mapping[TaskState, int]) -> None:
        """Reads the numbers of train tasks by state."""
        accepted = sum(train_counts.get(state, 0) for state in _ACCEPTED)
        ended = accepted + sum(train_counts.get(state, 0) for state in _DROPPED)
        self._seen.append((accepted, ended))
        enough = ended - _WINDOW_BATCHES * self._batch_size
        while len(self._seen) > 2 and self._seen[1][1] <= enough:
            self._seen.popleft()

    @property
    def acceptance(self) -> float:
        """Recent groups per ended task, counted as if one more had been accepted; 0 < x <= 1."""
        (first_accepted, first_ended), (accepted, ended) = self._seen[0], self._seen[-1]
        # A group that is made again, or a dead letter retried, takes back what had been counted.
        of = max(0, ended - first_ended)
        return (min(max(0, accepted - first_accepted), of) + 1) / (of + 1)

    @property
    def watermark(self) -> int:
        """Number of rows below which more are submitted: enough for all that may run ahead."""
        return round(self._ahead / max(self.acceptance, _LEAST_ACCEPTANCE))

    @property
    def target(self) -> int:
        """Number of rows to have queued after a submission: one batch more than the watermark."""
        return self.watermark + self._batch_size
