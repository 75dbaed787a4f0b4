"""Rank 0's status while the recipe runs, for the RPC and for regular log lines.

`TrainerStatus` is written by the recipe's thread and read by the RPC's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.chassis.logging import get_logger
from areal.chassis.waits import Wait
from areal.runs.step_rows import thin
from areal.v1 import trainer_service_pb2 as pb


@dataclass(frozen=True)
class Evaluation:
    """A mean reward on held-out rows."""

    name: str
    step: int
    """Finished steps of the policy that was measured."""
    mean_reward: float
    rows: int = 0
    """Rows in the mean; 0: unknown."""
    failed: int = 0
    """Rows without a result, which are not in the mean."""


@dataclass(frozen=True)
class StatusSnapshot:
    """A consistent reading of the trainer's status."""

    state: pb.TrainerState.ValueType = pb.TRAINER_STATE_STARTING
    step: int = 0
    total_steps: int = 0
    incarnation: int = 0
    world_size: int = 1
    detail: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    unfinished_s: float = 0.0
    """Seconds since the last step finished or, before the first, since the trainer opened."""


class TrainerStatus:
    """Thread-safe; `wait_for_row` is woken from the recipe's thread, without polling."""

    def __init__(self, total_steps: int, world_size: int) -> None:
        self._lock = threading.Lock()
        self._state: pb.TrainerState.ValueType = pb.TRAINER_STATE_STARTING
        self._detail = ""
        self._since = self._finished_at = time.monotonic()
        self._step = 0
        self._longest_s = 0.0
        self._incarnation = 0
        self._rows: list[dict[str, Any]] = []
        self._evaluations: list[Evaluation] = []
        self._total_steps = total_steps
        self._world_size = world_size
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def opened(
        self,
        incarnation: int,
        step: int,
        rows: list[dict[str, Any]],
        evaluations: Sequence[Evaluation] = (),
    ) -> None:
        """Records that the trainer has registered, perhaps resuming after `rows`."""
        with self._lock:
            self._incarnation, self._step, self._rows = incarnation, step, list(rows)
            thin(self._rows)
            self._evaluations = [e for e in evaluations if e.step <= step]
            self._finished_at = time.monotonic()
        self._wake()

    def waiting(self, what: str) -> None:
        """Waits for a batch."""
        self._set(pb.TRAINER_STATE_WAITING, what)

    def training(self) -> None:
        """Reports that the trainer computes."""
        self._set(pb.TRAINER_STATE_TRAINING, "")

    def saving(self, what: str) -> None:
        """Publishes weights or writes a checkpoint."""
        self._set(pb.TRAINER_STATE_SAVING, what)

    def ended(self, cause: str = "") -> None:
        """Records that the run finished, or why it failed."""
        self._set(pb.TRAINER_STATE_FAILED if cause else pb.TRAINER_STATE_FINISHED, cause)
        self._wake()

    def finished_step(self, step: int, row: dict[str, Any]) -> None:
        """Records the row of a finished step."""
        with self._lock:
            self._step = step
            self._rows.append(row)
            thin(self._rows)
            now = time.monotonic()
            self._longest_s = max(self._longest_s, now - self._finished_at)
            self._finished_at = now
        self._wake()

    @property
    def longest_step_s(self) -> float:
        """Longest time from the end of a step to that of the next, in seconds; 0: no step yet."""
        return self._longest_s

    def evaluated(self, evaluation: Evaluation) -> None:
        """Records that held-out rows were measured."""
        with self._lock:
            self._evaluations.append(evaluation)
        self._wake()

    def _set(self, state: pb.TrainerState.ValueType, detail: str) -> None:
        with self._lock:
            self._state, self._detail, self._since = state, detail, time.monotonic()

    def waits(self) -> Iterator[Wait]:
        """Yields what the recipe's thread waits for, for the watchdog."""
        with self._lock:
            state, detail, seconds = self._state, self._detail, time.monotonic() - self._since
        if state == pb.TRAINER_STATE_WAITING:
            yield Wait("batch", "buffer", seconds, detail)
        elif state == pb.TRAINER_STATE_SAVING:
            yield Wait("saving", "the weights folder and weight-sync", seconds, detail)
        elif state == pb.TRAINER_STATE_STARTING:
            yield Wait("start", "buffer, weight-sync", seconds)

    def _wake(self) -> None:
        with self._lock:
            waiters = list(self._waiters)
        for loop, event in waiters:
            loop.call_soon_threadsafe(event.set)

    def snapshot(self, after_step: int) -> StatusSnapshot:
        """Returns the current state, with the rows of steps above `after_step`.

        Of a long run, every step is there only at its beginning and its end; see `thin`.
        """
        with self._lock:
            rows = self._rows
            first = len(rows)
            while first and rows[first - 1]["step"] > after_step:
                first -= 1
            return StatusSnapshot(
                state=self._state,
                step=self._step,
                total_steps=self._total_steps,
                incarnation=self._incarnation,
                world_size=self._world_size,
                detail=self._detail,
                rows=rows[first:],
                evaluations=list(self._evaluations),
                unfinished_s=time.monotonic() - self._finished_at,
            )

    async def wait_for_row(self, after_step: int, max_wait_s: float) -> StatusSnapshot:
        """Like `snapshot`, but waits up to `max_wait_s` for a row above `after_step` or the end."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        with self._lock:
            self._waiters.add(waiter)
        try:
            snapshot = self.snapshot(after_step)
            ended = (pb.TRAINER_STATE_FINISHED, pb.TRAINER_STATE_FAILED)
            if not snapshot.rows and snapshot.state not in ended and max_wait_s > 0:
                try:
                    await asyncio.wait_for(event.wait(), max_wait_s)
                except TimeoutError:
                    return self.snapshot(after_step)
                return self.snapshot(after_step)
            return snapshot
        finally:
            with self._lock:
                self._waiters.discard(waiter)


INTERVAL_S = 5.0


class ProgressLog:
    """Logs training progress every few seconds: averages over the rows since the last line.

    The last step is always logged.
    """

    def __init__(
        self, total_steps: int, log: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`log` and `clock` are for tests."""
        self._total = total_steps
        self._log = get_logger(__name__) if log is None else log
        self._clock = clock
        self._since = clock() - INTERVAL_S  # the first step has a line
        self._rows: list[Mapping[str, Any]] = []

    def finished_step(self, row: Mapping[str, Any]) -> None:
        """Adds the row of a step; logs when it is time."""
        self._rows.append(row)
        now, step = self._clock(), int(row["step"])
        if now - self._since < INTERVAL_S and step < self._total:
            return
        shown: dict[str, Any] = {"step": f"{step}/{self._total}" if self._total else step}
        for name, key, digits in (
            ("reward", "reward/mean", 3),
            ("staleness", "staleness/mean", 2),
            ("step_seconds", "time/step", 2),
            ("waited_seconds", "time/wait", 2),
        ):
            values = [float(r[key]) for r in self._rows if r.get(key) is not None]
            if values:
                shown[name] = round(sum(values) / len(values), digits)
        self._log.info("training", **shown)
        self._since, self._rows = now, []
