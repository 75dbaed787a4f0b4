"""How many rows a trainer keeps queued: enough for the workers, however few groups they accept."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from areal.types import TaskState

# The rate is that of the last so many batches' worth of ended tasks.
_WINDOW_BATCHES = 4
# Rows are queued for a rate of at least this; below it, refills within a batch do the rest.
_LEAST_ACCEPTANCE = 0.05
_ACCEPTED = (TaskState.COMPLETED, TaskState.BATCHED, TaskState.TRAINED)
_DROPPED = (TaskState.REJECTED, TaskState.DEAD_LETTERED, TaskState.EXPIRED)


class RowSupply:
    """The number of rows to keep queued, from the ledger's own counters.

    While the trainer trains it submits nothing, and groups for (eta + 1) batches may be made (L4).
    Where the workflow drops rows, each group costs 1 / acceptance of them.
    """

    def __init__(self, batch_size: int, max_head_offpolicyness: int) -> None:
        """Nothing is known of the workflow yet: it accepts every row.

        Args:
            batch_size: Groups per train step (B).
            max_head_offpolicyness: The staleness bound (eta).
        """
        self._batch_size = batch_size
        self._ahead = (max_head_offpolicyness + 1) * batch_size
        # (accepted, ended) in the trial when the ledger was asked; the newest last.
        self._seen: deque[tuple[int, int]] = deque([(0, 0)])

    def observe(self, train_counts: Mapping[TaskState, int]) -> None:
        """Takes in the numbers of train tasks by state."""
        accepted = sum(train_counts.get(state, 0) for state in _ACCEPTED)
        ended = accepted + sum(train_counts.get(state, 0) for state in _DROPPED)
        self._seen.append((accepted, ended))
        enough = ended - _WINDOW_BATCHES * self._batch_size
        while len(self._seen) > 2 and self._seen[1][1] <= enough:
            self._seen.popleft()

    @property
    def acceptance(self) -> float:
        """Groups per ended task, lately, counted as if one more had been accepted; 0 < x <= 1."""
        (first_accepted, first_ended), (accepted, ended) = self._seen[0], self._seen[-1]
        # A group that is made again, or a dead letter retried, takes back what had been counted.
        of = max(0, ended - first_ended)
        return (min(max(0, accepted - first_accepted), of) + 1) / (of + 1)

    @property
    def watermark(self) -> int:
        """Rows below which more are submitted: with these, all that may run ahead gets done."""
        return round(self._ahead / max(self.acceptance, _LEAST_ACCEPTANCE))

    @property
    def target(self) -> int:
        """Rows to have queued after a submission: one batch more, to draw from."""
        return self.watermark + self._batch_size
