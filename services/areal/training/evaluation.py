"""Held-out rewards: when to measure, the tasks, their mean. Collective, like all batch calls.

| wait              | on     | unblocked by                   | deadline                |
|-------------------|--------|--------------------------------|-------------------------|
| room for tasks    | ledger | the time that its refusal says | rollout.batch_timeout_s |
| ends of the tasks | ledger | any of them                    | the same                |

Tasks are submitted as far as the ledger has room, and each result is read as soon as it is there:
it may then be released, so that an evaluation can be larger than the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal import errors
from areal.chassis.logging import get_logger
from areal.clients.buffer_reader import MAX_TASKS_PER_CALL
from areal.training.run_files import MEASURED_AT
from areal.training.session import TrainerSession
from areal.training.status import Evaluation
from areal.types import Purpose, Task, TaskState, WorkflowSpec

# One long poll; the ranks meet after each, so none idles in a collective for longer.
POLL_S = 10.0
_CHUNK = 500


def recorded(session: TrainerSession, name: str, version: int | None) -> float | None:
    """The figure that stands for the policy of now, if there is one; None of another `version`.

    That is one measured at this very step. A run that resumes has moved on from its initial
    policy, so until its first step that one's figure is taken from the record, too.
    """
    known = session.result(name)
    if known is None or version not in (None, session.step):
        return None
    at = (session.result(MEASURED_AT) or {}).get(name, 0)
    began = session.resumed.step if session.resumed else 0
    stands = at == session.step or (at == 0 and session.step == began)
    return float(known) if stands else None


def record(session: TrainerSession, name: str, mean: float) -> float:
    """Keeps a figure and the step it is of; returns the figure."""
    steps = dict(session.result(MEASURED_AT) or {})
    session.record(name, mean)
    session.record(MEASURED_AT, {**steps, name: session.step})
    session.status.evaluated(Evaluation(name, session.step, mean))
    return mean


def pinned(session: TrainerSession, name: str, version: int | None) -> int | None:
    """The version that every token must be of (rank 0); None where servers are ahead.

    Servers continue only when the trainer publishes, which waits for the evaluation: nothing has to
    be held back for it.

    Raises:
        NotFound: Another version than the one that servers are brought to is asked for.
    """
    served = session.served_version
    if version is None:
        return served if served == session.step else None
    if version != served:
        gone = "served no longer" if version < served else "not published yet"
        raise errors.NotFound(
            f"evaluation {name!r}: version {version} is {gone}; servers are brought to {served}"
        )
    return version


def tasks_of(
    session: TrainerSession,
    rows: Sequence[Mapping[str, Any]],
    spec: WorkflowSpec,
    name: str,
    version: int | None,
) -> list[Task]:
    """One task per row."""
    return [
        Task(
            # With the version: another policy's answers are other tasks. Without the incarnation:
            # a resumed run waits for the tasks that are there already.
            task_id=f"{name}-v{session.step if version is None else version}-{index}",
            purpose=Purpose.SERVE,
            workflow=spec,
            data=dict(row),
            policy_version=version,
        )
        for index, row in enumerate(rows)
    ]


def mean_reward(
    session: TrainerSession, tasks: Sequence[Task], name: str, timeout_s: float
) -> float:
    """Submits the tasks and waits for the end of all.

    Raises:
        WorkflowError: None was delivered, or too many tasks ended by errors of the recipe.
        WaitTimeout: Some have not ended within `timeout_s`, or found no room.
    """
    measurement = Measurement(session, tasks, name, timeout_s)
    while (state := session.on_rank0(measurement.proceed)) != "answered":
        session.raise_if_stopped()
        if state == "refused":
            session.save_checkpoint()  # commits, so that payloads can go
    return session.on_rank0(measurement.mean)


class Measurement:
    """The tasks of one evaluation (rank 0): to be submitted, waited for, answered."""

    def __init__(
        self, session: TrainerSession, tasks: Sequence[Task], name: str, timeout_s: float
    ) -> None:
        self._session = session
        self._name = name
        self._timeout_s = timeout_s
        self._since = time.monotonic()
        self._count = len(tasks)
        self._unsent = {task.task_id: task for task in tasks}
        self._waiting: dict[str, Task] = {}
        self._refusal: errors.CapacityExceeded | None = None
        self._not_before = 0.0
        self._rewards: list[float] = []
        self._reasons: list[str] = []
        self._log = get_logger("areal.training.evaluation")

    def proceed(self) -> str:
        """Submits what there is room for, takes in what has ended, or waits a while for some.

        Returns:
            answered: all are; refused: the ledger had no room when last asked; waiting.
        """
        self._submit()
        self._collect()
        left = len(self._unsent) + len(self._waiting)
        if left and time.monotonic() - self._since > self._timeout_s:
            what, hint = f"{left} of {self._count} tasks of evaluation {self._name!r}", ""
            if self._refusal is not None:
                what = f"{self._room()}: {self._refusal}"
                hint = "raise buffer.max_memory_mb, or checkpoint more often"
            raise errors.WaitTimeout(
                what, on=f"buffer {self._session.buffer.address}", since=self._since, hint=hint
            )
        return ("refused" if self._refusal else "waiting") if left else "answered"

    def mean(self) -> float:
        """Of the rewards of all trajectories."""
        if not self._rewards:
            raise errors.WorkflowError(
                f"evaluation {self._name!r}: none of {self._count} rows was delivered; "
                f"first cause: {self._reasons[0] if self._reasons else 'unknown'}"
            )
        return sum(self._rewards) / len(self._rewards)

    def _submit(self) -> None:
        session = self._session
        while self._unsent and time.monotonic() >= self._not_before:
            chunk = list(self._unsent.values())[:_CHUNK]
            what = f"submission of {len(chunk)} tasks"
            try:
                session.ask_buffer(
                    session.buffer.submit_tasks(chunk, incarnation=session.incarnation), what
                )
            except errors.CapacityExceeded as error:
                if error.retry_after_s is None:
                    raise
                if self._refusal is None:
                    self._log.warning("submission_held_back", tasks=len(chunk), cause=str(error))
                self._refusal = error
                self._not_before = time.monotonic() + error.retry_after_s
                # The first of them may have found room.
                found = session.ask_buffer(
                    session.buffer.get_tasks([task.task_id for task in chunk]), what
                )
                self._sent(record.task.task_id for record in found)
            else:
                self._refusal = None
                self._sent(task.task_id for task in chunk)

    def _room(self) -> str:
        return f"room for {len(self._unsent)} tasks of evaluation {self._name!r}"

    def _sent(self, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            self._waiting[task_id] = self._unsent.pop(task_id)

    def _collect(self) -> None:
        session, what = self._session, f"evaluation {self._name!r}"
        pause = POLL_S
        if self._unsent:
            pause = min(pause, max(0.0, self._not_before - time.monotonic()))
        if not self._waiting:
            if self._unsent:
                session.ask_buffer(asyncio.sleep(pause), self._room())
            return
        try:
            ended = session.ask_buffer(
                session.buffer.wait_tasks(
                    sorted(self._waiting)[:MAX_TASKS_PER_CALL],
                    pause,
                    incarnation=session.incarnation,
                ),
                what,
            )
        except errors.NotFound:
            # One was released before it was read, since the ledger was full: those that are still
            # there stay as they are when they are submitted again.
            self._unsent.update(self._waiting)
            self._waiting.clear()
            return
        if ended:
            session.ask_buffer(self._read(ended), f"results of {what}", self._timeout_s)

    async def _read(self, task_ids: Sequence[str]) -> None:
        buffer = self._session.buffer
        async for record in buffer.read_tasks(task_ids, include_groups=True):
            task = self._waiting.pop(record.task.task_id)
            if record.state is TaskState.DELIVERED and record.group is None:
                self._unsent[task.task_id] = task  # released, after an earlier life had read it
                continue
            self._reasons.append(record.reason)
            self._rewards.extend(
                t.reward for t in (record.group.trajectories if record.group else ())
            )
