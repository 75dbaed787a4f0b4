"""Measures held-out rewards. Collective, like all batch calls.

| wait              | on     | unblocked by | deadline                |
|-------------------|--------|--------------|-------------------------|
| ends of the tasks | buffer | any of them  | 3 x request_timeout_s   |

Tasks are submitted as far as the ledger has room. Each result is read as soon as it exists and may
then be released, so an evaluation can be larger than the ledger.

| end of a row's task                        | in the mean                           |
|--------------------------------------------|---------------------------------------|
| delivered                                  | the mean reward of its answers        |
| rejected: the workflow made no trajectory  | 0                                     |
| dead-lettered, expired or cancelled        | left out; counted as failed and named |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

import orjson

from areal import errors
from areal.chassis.logging import get_logger
from areal.clients.buffer.tasks import MAX_TASKS_PER_CALL
from areal.protocol.leases import TaskRecord
from areal.runs.metric_names import evaluation_names
from areal.runs.run_files import EVALUATIONS, MEASURED_AT, over_rows, write_atomically
from areal.runs.status import Evaluation
from areal.types import Purpose, Task, TaskState, WorkflowSpec
from areal_torch.training.ledger import POLL_S
from areal_torch.training.pass_at import pass_at
from areal_torch.training.session import TrainerSession
from areal_torch.training.submission import Submission

_CAUSE_LENGTH = 500


def recorded(session: TrainerSession, name: str, version: int | None) -> float | None:
    """Returns the current policy's recorded figure, if any; None for another `version`.

    It was measured at this very step. Until its first step, a resumed run also uses the recorded
    figure of its initial policy, which it no longer has.
    """
    known = session.result(name)
    if known is None or version not in (None, session.step):
        return None
    at = (session.result(MEASURED_AT) or {}).get(name, 0)
    began = session.resumed.step if session.resumed else 0
    stands = at == session.step or (at == 0 and session.step == began)
    return float(known) if stands else None


@dataclass(frozen=True)
class Figure:
    """A mean reward in which every row has the same weight, and how many rows it leaves out."""

    mean: float
    stderr: float
    """Standard error over rows; 0 for one row."""
    rows: int
    """Rows in the mean."""
    failed: int = 0
    """Rows without a result, which are not in the mean."""
    rejected: int = 0
    """Rows in the mean that count as 0, because the workflow made no trajectory."""
    cause: str = ""
    """The most frequent cause of failed rows, one line."""
    pass_at: dict[str, float] = field(default_factory=dict)
    """See `areal_torch.training.pass_at`; empty for rows with one answer."""


def record(session: TrainerSession, name: str, figure: Figure) -> float:
    """Keeps a figure and its step; returns its mean."""
    mean = figure.mean
    steps = dict(session.result(MEASURED_AT) or {})
    session.record(name, mean, evaluation_names(name, mean, figure.stderr, figure.failed))
    session.record(MEASURED_AT, {**steps, name: session.step})
    known = [
        each
        for each in session.result(EVALUATIONS) or []
        if (each["name"], each["step"]) != (name, session.step)
    ]
    entry = {"name": name, "step": session.step, **asdict(figure)}
    session.record(EVALUATIONS, [*known, entry])
    session.status.evaluated(Evaluation(name, session.step, mean, figure.rows, figure.failed))
    if figure.failed and session.rank == 0:
        get_logger(__name__).warning(
            "evaluation_is_incomplete", name=name, over=over_rows(entry), cause=figure.cause
        )
    return mean


def pinned(session: TrainerSession, name: str, version: int | None) -> int | None:
    """Returns the version that must sample every token (rank 0); None if servers are ahead.

    Servers change versions only when the trainer publishes, and it publishes nothing during an
    evaluation.

    Raises:
        NotFound: The requested version is not the one that servers load.
    """
    served = session.served_version
    if version is None:
        return served if served == session.step else None
    if version != served:
        gone = "no longer served" if version < served else "not published yet"
        raise errors.NotFound(
            f"evaluation {name!r}: version {version} is {gone}; servers are being "
            f"updated to {served}"
        )
    return version


def tasks_of(
    session: TrainerSession,
    rows: Sequence[Mapping[str, Any]],
    spec: WorkflowSpec,
    name: str,
    version: int | None,
) -> list[Task]:
    """Returns one task per row."""
    return [
        Task(
            # The id has the version: another policy's answers are other tasks. No incarnation:
            # a resumed run waits for the tasks that are there already.
            task_id=f"{name}-v{session.step if version is None else version}-{index}",
            purpose=Purpose.SERVE,
            workflow=spec,
            data=dict(row),
            policy_version=version,
        )
        for index, row in enumerate(rows)
    ]


def measure(session: TrainerSession, tasks: Sequence[Task], name: str, timeout_s: float) -> Figure:
    """Submits the tasks and waits for the end of all; keeps the answers in the run folder.

    They are in `evaluations/NAME-vVERSION.jsonl`, a line for each row: its task, data, and answers.
    A row without answers has `rejected` or `failed` instead, with the cause.

    Raises:
        WorkflowError: No task had a result.
        WaitTimeout: Some have not ended within `timeout_s`, or found no room.
    """
    measurement = Measurement(session, tasks, name, timeout_s)
    while (state := session.on_rank0(measurement.proceed)) != "answered":
        session.raise_if_stopped()
        if state == "refused":
            session.save_checkpoint()  # commits, so that payloads can go
            session.turn.give()
    return session.on_rank0(measurement.finish, Figure)


class Measurement:
    """The tasks of one evaluation (rank 0): submits them and collects their results."""

    def __init__(
        self, session: TrainerSession, tasks: Sequence[Task], name: str, timeout_s: float
    ) -> None:
        self._session = session
        self._what = f"evaluation {name!r}"
        version = tasks[0].policy_version if tasks else None
        at = session.step if version is None else version
        self._file = session.config.run_dir / "evaluations" / f"{name}-v{at}.jsonl"
        self._timeout_s = timeout_s
        self._count = len(tasks)
        self._submission = Submission(session, tasks, self._what, timeout_s)
        self._waiting: dict[str, Task] = {}
        self._lines: list[dict[str, Any]] = []

    def proceed(self) -> str:
        """Submits tasks while there is room, reads results, or waits a while for some.

        Returns:
            answered: all tasks have results; refused: the ledger had no room; else waiting.
        """
        submission = self._submission
        self._waiting |= submission.send()
        if self._waiting:
            self._collect()
        elif submission.unsent:
            submission.pause()
        left = len(submission.unsent) + len(self._waiting)
        if not left:
            return "answered"
        submission.check_deadline(f"{left} of {self._count} tasks of {self._what}")
        return "refused" if submission.refused else "waiting"

    def finish(self) -> Figure:
        """Returns the figure over all rows; the answers are on disk then."""
        causes = Counter(each["failed"] for each in self._lines if "failed" in each)
        failed = causes.total()
        rewards = [
            [one["reward"] for one in each["answers"]]
            for each in self._lines
            if "failed" not in each
        ]
        means = [fmean(row) if row else 0.0 for row in rewards]
        if not means:
            raise errors.WorkflowError(
                f"{self._what}: none of {self._count} rows was delivered; "
                f"first cause: {next(iter(causes), 'unknown')}"
            )
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, b"".join(orjson.dumps(line) + b"\n" for line in self._lines))
        error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
        rejected = sum("rejected" in each for each in self._lines)
        cause = causes.most_common(1)[0][0] if failed else ""
        mean = fmean(means)
        return Figure(mean, error, len(means), failed, rejected, cause, pass_at(rewards))

    def _collect(self) -> None:
        session, unsent = self._session, self._submission.unsent
        some = sorted(self._waiting)[:MAX_TASKS_PER_CALL]
        try:
            ended = session.ledger.wait_ended(
                some, self._submission.next_try_s if unsent else POLL_S, self._what
            )
        except errors.NotFound:
            # One was released before it was read, since the ledger was full: those that are still
            # there stay as they are when they are submitted again.
            unsent.update(self._waiting)
            self._waiting.clear()
            return
        if ended:
            session.ledger.read_results(
                ended, self._read, f"results of {self._what}", self._timeout_s
            )

    def _read(self, record: TaskRecord) -> None:
        task = self._waiting.pop(record.task.task_id)
        if record.state is TaskState.DELIVERED and record.group is None:
            self._submission.unsent[task.task_id] = task  # released after an earlier read
            return
        # The row as rewards get it: files of images would not fit into a line.
        data = {name: value for name, value in task.data.items() if name != "images"}
        line: dict[str, Any] = {"task_id": task.task_id, "data": data, "answers": []}
        self._lines.append(line)
        if record.group is not None:
            line["answers"] = [
                {"reward": t.reward, "finish_reason": t.finish_reason, "text": t.completion_text}
                for t in record.group.trajectories
            ]
            return
        # A workflow rejects what the model wrote: left out, such rows would raise the mean.
        kind = "rejected" if record.state is TaskState.REJECTED else "failed"
        reason = record.reason or record.state.value
        line[kind] = " ".join(reason.split())[:_CAUSE_LENGTH]
