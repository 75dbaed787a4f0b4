"""The types that go into and out of the ledger, and their messages.

The buffer creates leases and records as messages, because it does not decode the tasks and groups
in them. A take, a registration and statistics it creates as these types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from areal.protocol.trajectories import STATE_FROM_PB, STATE_TO_PB, group_from_pb, task_from_pb
from areal.types import Task, TaskState, TrajectoryGroup
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2


class ReturnCause(StrEnum):
    """The cause of a failed attempt; each cause has its own limit of attempts."""

    DRAIN = "drain"
    """The worker is leaving; such an attempt does not count toward any limit."""
    WORKFLOW_ERROR = "workflow_error"
    """arun_episode or reward_fn raised."""
    INFRASTRUCTURE = "infrastructure"
    """A server, the reward service or the network failed."""


class TakeState(StrEnum):
    """The outcome of a TakeBatch call."""

    TAKEN = "taken"
    WAITING = "waiting"
    """Not enough yet; call again. `waiting_for` says for what."""
    CHECKPOINT_FIRST = "checkpoint_first"
    """Memory is near its limit: save a checkpoint, commit, then call again."""
    EXHAUSTED = "exhausted"
    """Sealed, and nothing is left."""


@dataclass(frozen=True)
class Lease:
    """The right to work on a task until `time_to_live_s` after the last renewal."""

    task: Task
    token: int
    """Fencing token."""
    policy_version: int
    """No request of this task may start on a server below this version."""
    time_to_live_s: float
    partial: bytes = b""
    """Journal of an earlier attempt; may be empty."""
    failed_servers: tuple[str, ...] = ()
    """Servers on which earlier attempts failed."""
    queued_time: float = 0.0
    """Seconds since the epoch at which it was queued; 0: unknown."""
    attempts: int = 0
    """Attempts of a session whose agents stopped calling: its group consists of the attempts that
    have ended."""


@dataclass(frozen=True, slots=True)
class Return:
    """The end of a lease without a group."""

    cause: ReturnCause
    """The cause of the failure, which decides which limit counts."""
    detail: str = ""
    """One line for people."""
    traceback: str = ""
    """The stack trace, for the dead-letter list."""
    failed_server: str = ""
    """The inference server that failed, which the next attempt avoids."""
    site: str = ""
    """For an error of the workflow, what all tasks that fail in the same way share, e.g. "KeyError
    at recipe.py:41"; empty: the detail without the row's values."""
    partial: Callable[[], bytes] = bytes
    """The journal for the next attempt: a function that encodes it when the request is built, so
    that many journals are encoded while the ledger takes earlier ones. `bytes` itself means that
    there is no journal."""


@dataclass(frozen=True)
class TakenGroup:
    """A group of a batch, without its arrays."""

    task_id: str
    lengths: tuple[int, ...]
    """Tokens of each trajectory."""
    head_version: int
    completed_time: float = 0.0
    """Seconds since the epoch at which it was completed; 0: unknown."""


@dataclass(frozen=True)
class Take:
    """The answer to one attempt at a batch."""

    state: TakeState
    groups: tuple[TakenGroup, ...] = ()
    waiting_for: str = ""
    replay: bool = False
    """Whether these groups were handed out to an earlier incarnation."""
    queued: int = 0
    """Train tasks now queued, running or completed, from which the trainer derives how many to
    submit."""
    running: int = 0
    completed: int = 0
    rows_wanted: bool = False
    """Whether the call was ended early because fewer tasks are queued than the caller's
    `refill_below`; only for the buffer."""
    first_groups: tuple[bytes, ...] = ()
    """The first packed groups, sent with this answer; `BufferTrainer` keeps them for later."""


@dataclass(frozen=True)
class Registration:
    """A trainer's place in the ledger."""

    incarnation: int
    last_taken_step: int
    """Steps up to this one get the same batches as before."""
    last_committed_step: int
    retried: int = 0
    """Tasks that were queued again after an error of the recipe had ended them."""


@dataclass(frozen=True)
class TaskRecord:
    """What the ledger knows of a task."""

    task: Task
    """The task; only id and purpose once its payload has been released."""
    state: TaskState
    reason: str
    attempts: int
    infrastructure_attempts: int
    submit_time: float
    """Seconds since the epoch."""
    end_time: float | None
    """Seconds since the epoch; None while the task has not ended."""
    group: TrajectoryGroup | None
    step: int
    """The train step that took it; 0 if none."""


@dataclass(frozen=True)
class DeadLetter:
    """A task that failed permanently, and why."""

    record: TaskRecord
    cause: str
    traceback: str


@dataclass(frozen=True)
class WorkflowFailure:
    """An error that several attempts share."""

    site: str
    """The failing line, e.g. `KeyError at recipe.py:41`."""
    attempts: int
    task_id: str
    """Id of the first such task; detail and time are from the same task."""
    detail: str
    """One line, with file and line where they are known."""
    time: float
    """Seconds since the epoch."""

    def __str__(self) -> str:
        return f"task {self.task_id} failed: {self.detail}"


@dataclass(frozen=True)
class Discarded:
    """A train task that ended without being trained on, or a group that was dropped."""

    task_id: str
    token: int
    """Fencing token of its last lease; 0: it had none."""
    outcome: str
    """rejected, expired, dead_lettered, cancelled, or too_stale: then the task was queued again."""
    reason: str
    group: TrajectoryGroup | None = None
    """The group; None: there was none, or the ledger had no room for it."""


@dataclass(frozen=True)
class LedgerStats:
    """Counters and gauges of the ledger. Times in seconds since the epoch."""

    submitted: int = 0
    """Every task ever submitted in this trial."""
    counts: dict[TaskState, int] = field(default_factory=dict)
    train_counts: dict[TaskState, int] = field(default_factory=dict)
    policy_version: int = 0
    incarnation: int = 0
    """The incarnation of the trainer that registered last."""
    last_taken_step: int = 0
    last_committed_step: int = 0
    batch_size: int = 0
    max_head_offpolicyness: int = 0
    max_concurrent_rollouts: int = 0
    admission_headroom: int = 0
    """Groups that admission would still let start."""
    staleness_mean: float = 0.0
    """Mean staleness of taken groups, over the trial."""
    staleness_max: int = 0
    regenerated: int = 0
    """Groups generated again because they had become too stale."""
    trajectories: int = 0
    generated_tokens: int = 0
    redis_memory_bytes: int = 0
    """Memory that Redis uses for all data of all its users."""
    held_bytes: int = 0
    """Bytes of the tasks that this ledger holds, and how many it may hold now."""
    limit_bytes: int = 0
    stopped: str = ""
    """Why the run was stopped; empty: it was not."""
    retried: int = 0
    """Dead letters that were queued again when the trainer registered."""
    oldest_queued_time: float | None = None
    """When the oldest queued task was submitted; None: none is queued."""
    failures: tuple[WorkflowFailure, ...] = ()
    """Since the trainer registered, the most frequent first."""


_TALLIES = ("counts", "train_counts")
_NUMBERS = [
    each.name
    for each in fields(LedgerStats)
    if each.name not in (*_TALLIES, "oldest_queued_time", "failures")
]


def record_from_pb(message: trajectory_pb2.TaskRecord) -> TaskRecord:
    """Converts a message to a task's record."""
    return TaskRecord(
        task=task_from_pb(message.task),
        state=STATE_FROM_PB[message.state],
        reason=message.reason,
        attempts=message.attempts,
        infrastructure_attempts=message.infrastructure_attempts,
        submit_time=message.submit_time.ToMicroseconds() / 1e6,
        end_time=(
            message.end_time.ToMicroseconds() / 1e6 if message.HasField("end_time") else None
        ),
        group=group_from_pb(message.group) if message.HasField("group") else None,
        step=message.step,
    )


def take_from_pb(message: pb.TakeBatchResponse) -> Take:
    """Decodes a take, without the groups in it."""
    return Take(
        state=TakeState(pb.TakeState.Name(message.state).removeprefix("TAKE_STATE_").lower()),
        groups=tuple(
            TakenGroup(
                group.task_id, tuple(group.lengths), group.head_version, _unix(group.completed_time)
            )
            for group in message.groups
        ),
        waiting_for=message.waiting_for,
        replay=message.replay,
        queued=message.queued,
        running=message.running,
        completed=message.completed,
    )


def take_to_pb(take: Take) -> pb.TakeBatchResponse:
    """Converts a take to its message."""
    return pb.TakeBatchResponse(
        state=pb.TakeState.Value(f"TAKE_STATE_{take.state.name}"),
        groups=[
            pb.TakenGroup(
                task_id=group.task_id,
                lengths=group.lengths,
                head_version=group.head_version,
                completed_time=_timestamp(group.completed_time),
            )
            for group in take.groups
        ],
        waiting_for=take.waiting_for,
        replay=take.replay,
        queued=take.queued,
        running=take.running,
        completed=take.completed,
        first_groups=take.first_groups,
    )


def stats_from_pb(message: pb.GetStatsResponse) -> LedgerStats:
    """Decodes the ledger's statistics."""
    values: dict[str, Any] = {name: getattr(message, name) for name in _NUMBERS}
    for name in _TALLIES:
        values[name] = dict.fromkeys(TaskState, 0) | {
            STATE_FROM_PB[each.state]: each.tasks
            for each in getattr(message, name)
            if each.state in STATE_FROM_PB
        }
    return LedgerStats(
        **values,
        oldest_queued_time=_unix(message.oldest_queued_time) or None,
        failures=tuple(
            WorkflowFailure(each.site, each.attempts, each.task_id, each.detail, _unix(each.time))
            for each in message.failures
        ),
    )


def stats_to_pb(stats: LedgerStats) -> pb.GetStatsResponse:
    """Encodes the ledger's statistics."""
    values: dict[str, Any] = {name: getattr(stats, name) for name in _NUMBERS}
    for name in _TALLIES:
        values[name] = [
            pb.StateCount(state=STATE_TO_PB[state], tasks=tasks)
            for state, tasks in getattr(stats, name).items()
        ]
    return pb.GetStatsResponse(
        **values,
        oldest_queued_time=_timestamp(stats.oldest_queued_time or 0.0),
        failures=[
            pb.WorkflowFailure(
                site=each.site,
                attempts=each.attempts,
                task_id=each.task_id,
                detail=each.detail,
                time=_timestamp(each.time),
            )
            for each in stats.failures
        ],
    )


def _unix(stamp: Timestamp) -> float:
    """Returns seconds since the epoch; 0: absent."""
    return stamp.ToMilliseconds() / 1000


def _timestamp(seconds: float) -> Timestamp | None:
    if not seconds:
        return None
    stamp = Timestamp()
    stamp.FromMilliseconds(round(seconds * 1000))
    return stamp
