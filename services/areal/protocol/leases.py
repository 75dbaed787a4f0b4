"""What crosses the border of the ledger: leases, batches, records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal.protocol.trajectories import (
    STATE_FROM_PB,
    STATE_TO_PB,
    group_from_pb,
    group_to_pb,
    task_from_pb,
    task_to_pb,
)
from areal.types import Task, TaskState, TrajectoryGroup
from areal.v1 import trajectory_pb2


class ReturnCause(StrEnum):
    """Whose fault the end of an attempt was; each kind has its own limit."""

    DRAIN = "drain"
    """The worker is leaving; counts against nothing."""
    WORKFLOW_ERROR = "workflow_error"
    """arun_episode or reward_fn raised."""
    INFRASTRUCTURE = "infrastructure"
    """A server, the reward service or the network failed."""


class TakeState(StrEnum):
    """What became of a TakeBatch call."""

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
    """Since when it was queued, seconds since the epoch; 0: unknown."""


@dataclass(frozen=True)
class GroupManifest:
    """A taken group, without its arrays."""

    task_id: str
    lengths: tuple[int, ...]
    """Tokens of each trajectory."""
    head_version: int
    completed_time: float = 0.0
    """Since when it was completed, seconds since the epoch; 0: unknown."""


@dataclass(frozen=True)
class TakeResult:
    """What TakeBatch answered."""

    state: TakeState
    groups: tuple[GroupManifest, ...] = ()
    waiting_for: str = ""
    replay: bool = False
    """These groups were handed out to an earlier incarnation."""
    queued: int = 0
    """Train tasks now queued, running, completed: how much the trainer need submit."""
    running: int = 0
    completed: int = 0


@dataclass(frozen=True)
class Registration:
    """A trainer's place in the ledger."""

    incarnation: int
    last_taken_step: int
    """Steps up to this one replay the batches they had."""
    last_committed_step: int
    retried: int = 0
    """Tasks that an error of the recipe had ended, queued again."""


@dataclass(frozen=True)
class TaskRecord:
    """What the ledger knows of a task."""

    task: Task
    """Only id and purpose once the task's payload has been released."""
    state: TaskState
    reason: str
    attempts: int
    infrastructure_attempts: int
    submit_time: float
    """Seconds since the epoch."""
    end_time: float | None
    """Seconds since the epoch; None while the task lives."""
    group: TrajectoryGroup | None
    step: int
    """The train step that took it; 0 if none."""


@dataclass(frozen=True)
class DeadLetter:
    """A task given up, and why."""

    record: TaskRecord
    cause: str
    traceback: str


def record_from_pb(message: trajectory_pb2.TaskRecord) -> TaskRecord:
    """Decodes a record."""
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


def record_to_pb(record: TaskRecord) -> trajectory_pb2.TaskRecord:
    """Encodes a record; the inverse of `record_from_pb`."""
    message = trajectory_pb2.TaskRecord(
        task=task_to_pb(record.task),
        state=STATE_TO_PB[record.state],
        reason=record.reason,
        attempts=record.attempts,
        infrastructure_attempts=record.infrastructure_attempts,
        step=record.step,
    )
    message.submit_time.FromMicroseconds(round(record.submit_time * 1e6))
    if record.end_time is not None:
        message.end_time.FromMicroseconds(round(record.end_time * 1e6))
    if record.group is not None:
        message.group.CopyFrom(group_to_pb(record.group))
    return message
