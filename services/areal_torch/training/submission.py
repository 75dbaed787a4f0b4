"""Submits the tasks that a batch call needs, as far as the ledger has room (rank 0).

    unsent ── room ──> sent
       ^ └── refused ──┐
       └── the time that the refusal says, or POLL_S ──┘

| wait           | on     | unblocked by                   | deadline                |
|----------------|--------|--------------------------------|-------------------------|
| room for tasks | buffer | the time that its refusal says | 3 x request_timeout_s   |
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from areal import errors
from areal.chassis.logging import get_logger
from areal.types import Task
from areal_torch.training.ledger import POLL_S
from areal_torch.training.session import TrainerSession

_CHUNK = 500


class Submission:
    """The tasks of one call."""

    def __init__(
        self, session: TrainerSession, tasks: Iterable[Task], what: str, timeout_s: float
    ) -> None:
        """Sends nothing yet.

        Args:
            session: The trainer's session.
            tasks: Tasks to submit; those that the ledger already has do not change.
            what: Their purpose, named in errors.
            timeout_s: Limit for all of them, from now on.
        """
        self.unsent = {task.task_id: task for task in tasks}
        self.refused: errors.CapacityExceeded | None = None
        """The ledger's latest refusal, if it had no room."""
        self.since = time.monotonic()
        self._session = session
        self._what = what
        self._timeout_s = timeout_s
        self._not_before = 0.0
        self._log = get_logger(__name__)

    def proceed(self) -> bool:
        """Sends tasks while there is room, else waits a moment; returns whether all are sent.

        Raises:
            WaitTimeout: The ledger was full the whole time.
        """
        self.send()
        if self.unsent:
            self.check_deadline(self._what)
            self.pause()
        return not self.unsent

    def send(self) -> dict[str, Task]:
        """Sends tasks while there is room; returns those that the ledger now has."""
        sent: dict[str, Task] = {}
        while self.unsent and time.monotonic() >= self._not_before:
            ids = list(self.unsent)[:_CHUNK]
            try:
                self._session.ledger.submit([self.unsent[task_id] for task_id in ids])
                self.refused = None
            except errors.CapacityExceeded as error:
                if error.retry_after_s is None:
                    raise
                if self.refused is None:
                    self._log.warning("submission_held_back", tasks=len(ids), cause=str(error))
                self.refused = error
                self._not_before = time.monotonic() + error.retry_after_s
                ids = list(self._session.ledger.states(ids))  # the first may have found room
            sent |= {task_id: self.unsent.pop(task_id) for task_id in ids}
        return sent

    @property
    def next_try_s(self) -> float:
        """Returns the seconds until the ledger may be asked again; at most a poll's."""
        return min(POLL_S, max(0.0, self._not_before - time.monotonic()))

    def pause(self) -> None:
        """Waits until the ledger may be asked again."""
        self._session.ledger.pause(self.next_try_s, self._room)

    def check_deadline(self, what: str) -> None:
        """Raises WaitTimeout if the time has passed: for room, or else for `what`."""
        if time.monotonic() - self.since <= self._timeout_s:
            return
        hint = ""
        if self.refused is not None:
            what = f"{self._room}: {self.refused}"
            hint = "raise buffer.max_memory_mb, or checkpoint more often"
        raise errors.WaitTimeout(
            what, on=self._session.ledger.name, since=self.since, hint=hint
        ) from None

    @property
    def _room(self) -> str:
        return f"room for {len(self.unsent)} tasks of {self._what}"
